{{/* Mistakes across the router's fields: one message a line, or nothing. */}}
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
{{- range $route := list "httpRoute" "grpcRoute" -}}
{{- with get $router $route -}}
{{- if .enabled -}}
{{- if not ($.Capabilities.APIVersions.Has "gateway.networking.k8s.io/v1") }}
router.{{ $route }}.enabled: the cluster has no gateway.networking.k8s.io/v1; install the Gateway API first (with `helm template`: --api-versions gateway.networking.k8s.io/v1)
{{- end -}}
{{- if not .parentRefs }}
router.{{ $route }}.parentRefs is empty: the route needs a Gateway
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $router.grpcRoute.enabled (not $router.service.grpcPort) }}
router.grpcRoute.enabled: without router.service.grpcPort there is no gRPC
{{- end -}}
{{- include "lockstep.validate.router.memory" . -}}
{{- $here := dict "root" . "at" "router" "options" $router "owned" "router" -}}
{{- include "lockstep.validate.settings" $here -}}
{{- include "lockstep.validate.grace" $here -}}
{{- include "lockstep.validate.disruption" $here -}}
{{- end -}}

{{/* Bodies count twice: while one is parsed, there are its bytes and what they become. */}}
{{- define "lockstep.validate.router.memory" -}}
{{- range $kind := list "limits" "requests" -}}
{{- with (get $.Values.router.resources $kind | default dict).memory -}}
{{- if not (include "lockstep.bytes" .) }}
router.resources.{{ $kind }}.memory: {{ . }} is no number of bytes: write 512Mi, 2Gi or 1.5G
{{- end -}}
{{- end -}}
{{- end -}}
{{- with include "lockstep.router.budgets" . | fromYaml -}}
{{- $given := include "lockstep.bytes" $.Values.router.resources.limits.memory | int64 -}}
{{- $journals := int64 .max_journals_bytes -}}
{{- $bodies := int64 .max_bodies_bytes -}}
{{- $least := addf 134217728 $journals $bodies $bodies | int64 -}}
{{- if lt $given $least }}
router.resources.limits.memory: {{ $.Values.router.resources.limits.memory }} is less than {{ include "lockstep.quantity" $least }} = 128Mi + settings.max_journals_bytes {{ include "lockstep.quantity" $journals }} + 2 × settings.max_bodies_bytes {{ include "lockstep.quantity" $bodies }}: the kernel would kill the router before it refuses requests. Raise the limit (512Mi at least, if neither is set), or set less
{{- end -}}
{{- end -}}
{{- end -}}
