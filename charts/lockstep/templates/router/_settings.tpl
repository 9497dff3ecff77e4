{{/* The most routers that there may be, but for a rollout. */}}
{{- define "lockstep.router.most" -}}
{{- ternary .Values.router.autoscaling.maxReplicas .Values.router.replicas .Values.router.autoscaling.enabled -}}
{{- end -}}

{{/* The router's settings: what the chart decides, over what `router.settings` says. validate/ refuses the chart's keys there. */}}
{{- define "lockstep.router.settings" -}}
{{- $workers := printf "%s.%s.svc" (include "lockstep.workers.name" .) .Release.Namespace -}}
{{- $settings := deepCopy .Values.router.settings -}}
{{- $_ := set $settings "host" "0.0.0.0" -}}
{{- $_ := set $settings "port" 8000 -}}
{{- $_ := set $settings "discovery" .Values.router.discovery -}}
{{- /* The watch's fallback as well, for when the API server is away. */ -}}
{{- $_ := set $settings "workers_dns" (list (printf "%s:9000" $workers)) -}}
{{- if eq .Values.router.discovery "kubernetes" -}}
{{- $_ := set $settings "kubernetes_selector" (printf "kubernetes.io/service-name=%s" (include "lockstep.workers.name" .)) -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}
