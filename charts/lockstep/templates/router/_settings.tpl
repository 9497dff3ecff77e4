{{/* The largest number of routers, except during a rollout. */}}
{{- define "lockstep.router.most" -}}
{{- ternary .Values.router.autoscaling.maxReplicas .Values.router.replicas .Values.router.autoscaling.enabled -}}
{{- end -}}

{{/*
What the router may hold in memory, `max_journals_bytes` and `max_bodies_bytes`: as they are set, or a half and an eighth of the limit,
so that the router refuses requests before the kernel kills it. Nothing without a limit. Takes the root context; gives YAML.
*/}}
{{- define "lockstep.router.budgets" -}}
{{- $settings := .Values.router.settings -}}
{{- with (.Values.router.resources.limits).memory | include "lockstep.bytes" | int64 -}}
max_journals_bytes: {{ $settings.max_journals_bytes | default (div . 2) | int64 }}
max_bodies_bytes: {{ $settings.max_bodies_bytes | default (div . 8) | int64 }}
{{- end -}}
{{- end -}}

{{/* The policies that every router has, as services/router/src/lockstep_router/policies/names.py lists them: names with a space between. */}}
{{- define "lockstep.router.builtInPolicies" -}}
sticky hybrid stateless round_robin weighted least_loaded prefix_aware
{{- end -}}

{{/*
Policies that no router has by itself, so that a package has to bring each as an entry point: their names by their settings. Takes the root
context; gives YAML.
*/}}
{{- define "lockstep.router.otherPolicies" -}}
{{- $builtIn := include "lockstep.router.builtInPolicies" . | splitList " " -}}
{{- $settings := .Values.router.settings -}}
{{- $others := dict -}}
{{- if hasKey $settings "policy" -}}
{{- if not (has $settings.policy $builtIn) -}}
{{- $_ := set $others "policy" $settings.policy -}}
{{- end -}}
{{- end -}}
{{- range $model, $policy := $settings.model_policies -}}
{{- if not (has $policy $builtIn) -}}
{{- $_ := set $others (printf "model_policies.%s" $model) $policy -}}
{{- end -}}
{{- end -}}
{{- toYaml $others -}}
{{- end -}}

{{/*
Settings for single models whose model the release does not have: the name of the model, as clients use it, by the setting. Takes the root
context; gives YAML.
*/}}
{{- define "lockstep.router.settingsOfNobody" -}}
{{- $served := list -}}
{{- range include "lockstep.models" . | fromYamlArray -}}
{{- $served = append $served (.servedName | default .name) -}}
{{- end -}}
{{- $found := dict -}}
{{- range $setting := list "model_policies" "model_tool_formats" "model_reasoning_formats" -}}
{{- range $model, $_ := get $.Values.router.settings $setting | default dict -}}
{{- if not (has $model $served) -}}
{{- $_ := set $found (printf "%s.%s" $setting $model) $model -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $found -}}
{{- end -}}

{{/* The router's settings: those that the chart sets, and `router.settings`. validate/ refuses the chart's keys there. */}}
{{- define "lockstep.router.settings" -}}
{{- $workers := printf "%s.%s.svc" (include "lockstep.workers.name" .) .Release.Namespace -}}
{{- $settings := deepCopy .Values.router.settings -}}
{{- $_ := merge $settings (include "lockstep.router.budgets" . | fromYaml) -}}
{{- $_ := set $settings "host" (include "lockstep.listenAddress" .) -}}
{{- $_ := set $settings "port" 8000 -}}
{{- if .Values.router.service.grpcPort -}}
{{- $_ := set $settings "grpc_port" 8002 -}}
{{- end -}}
{{- $_ := set $settings "management_host" (include "lockstep.listenAddress" .) -}}
{{- $_ := set $settings "management_port" 8001 -}}
{{- $_ := set $settings "console_routers" (list (printf "%s.%s.svc:8001" (include "lockstep.routers.name" .) .Release.Namespace)) -}}
{{- $_ := set $settings "discovery" .Values.router.discovery -}}
{{- /* Also the fallback of the watch, when the API server cannot be reached. */ -}}
{{- $_ := set $settings "workers_dns" (list (printf "%s:9000" $workers)) -}}
{{- if eq .Values.router.discovery "kubernetes" -}}
{{- $_ := set $settings "kubernetes_selector" (printf "kubernetes.io/service-name=%s" (include "lockstep.workers.name" .)) -}}
{{- end -}}
{{- /* Only those that may be scaled to zero: a new model must not roll the routers. */ -}}
{{- $served := $settings.served_models | default list -}}
{{- range include "lockstep.models" . | fromYamlArray -}}
{{- if and .autoscaling.enabled (not (int .autoscaling.minReplicas)) -}}
{{- $served = append $served (.servedName | default .name) -}}
{{- end -}}
{{- end -}}
{{- with uniq $served -}}
{{- $_ := set $settings "served_models" . -}}
{{- end -}}
{{- include "lockstep.tls.settings" (dict "root" . "settings" $settings "peer" "worker") -}}
{{- if include "lockstep.tls.http" . -}}
{{- $directory := .Values.tls.http.secretName | empty | ternary "/etc/lockstep-tls" "/etc/lockstep-http-tls" -}}
{{- $_ := set $settings "http_tls_cert" (printf "%s/tls.crt" $directory) -}}
{{- $_ := set $settings "http_tls_key" (printf "%s/tls.key" $directory) -}}
{{- if .Values.tls.http.clientCASecretName -}}
{{- $_ := set $settings "http_tls_client_ca" "/etc/lockstep-client-ca/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- if .Values.router.keys.secretName -}}
{{- $_ := set $settings "keys_file" "/etc/lockstep-keys/keys.yaml" -}}
{{- end -}}
{{- with .Values.router.limitsStorage -}}
{{- if .address -}}
{{- $_ := set $settings "limits_storage" .address -}}
{{- if .passwordSecretName -}}
{{- $_ := set $settings "limits_storage_password_file" "/etc/lockstep-limits/password" -}}
{{- end -}}
{{- if .caSecretName -}}
{{- $_ := set $settings "limits_storage_ca" "/etc/lockstep-limits-ca/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if .Values.state.enabled -}}
{{- include "lockstep.state.callerSettings" (dict "root" . "settings" $settings) -}}
{{- end -}}
{{- include "lockstep.tracing.settings" (dict "root" . "settings" $settings) -}}
{{- toYaml $settings -}}
{{- end -}}
