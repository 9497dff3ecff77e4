{{/* What may be wrong with the router across fields: one sentence a line, or nothing. */}}
{{- define "lockstep.validate.router" -}}
{{- $router := .Values.router -}}
{{- with $router.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
router.autoscaling: minReplicas {{ .minReplicas }} is more than maxReplicas {{ .maxReplicas }}
{{- end -}}
{{- if and .enabled (not ($router.resources.requests).cpu) }}
router.autoscaling counts in router.resources.requests.cpu, which is not set
{{- end -}}
{{- end -}}
{{- with $router.httpRoute -}}
{{- if .enabled -}}
{{- if not ($.Capabilities.APIVersions.Has "gateway.networking.k8s.io/v1") }}
router.httpRoute.enabled: the cluster has no gateway.networking.k8s.io/v1; install the Gateway API first (with `helm template`: --api-versions gateway.networking.k8s.io/v1)
{{- end -}}
{{- if not .parentRefs }}
router.httpRoute.parentRefs is empty: the route needs a Gateway
{{- end -}}
{{- end -}}
{{- end -}}
{{- $here := dict "root" . "at" "router" "options" $router "owned" "router" -}}
{{- include "lockstep.validate.settings" $here -}}
{{- include "lockstep.validate.grace" $here -}}
{{- end -}}
