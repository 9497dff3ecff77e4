{{/* Checks for every service of the release. They take (root, at, options). */}}

{{/* Settings that are the chart's; `owned` names the service in owned-settings.yaml. */}}
{{- define "lockstep.validate.settings" -}}
{{- $here := . -}}
{{- range $key, $instead := get (.root.Files.Get "owned-settings.yaml" | fromYaml) .owned -}}
{{- if hasKey $here.options.settings $key }}
{{ $here.at }}.settings.{{ $key }} is not to be set: {{ $instead }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The grace period is computed from this number, so it must be set. */}}
{{- define "lockstep.validate.grace" -}}
{{- $settings := .options.settings -}}
{{- if not (hasKey $settings "drain_timeout_s") }}
{{ .at }}.settings.drain_timeout_s is missing: the grace period is made of it
{{- end -}}
{{- $least := include "lockstep.leastGrace" . | int64 -}}
{{- $given := include "lockstep.gracePeriod" . | int64 -}}
{{- if lt $given $least }}
{{ .at }}.terminationGracePeriodSeconds: {{ $given }} s are too short for {{ include "lockstep.graceInWords" . }}: streams would be cut off
{{- end -}}
{{- end -}}

{{/* A budget that allows no disruption at the fewest pods would block every drain of a node. */}}
{{- define "lockstep.validate.disruption" -}}
{{- $options := .options -}}
{{- $most := ternary $options.autoscaling.maxReplicas $options.replicas $options.autoscaling.enabled | int -}}
{{- $least := ternary $options.autoscaling.minReplicas $options.replicas $options.autoscaling.enabled | int -}}
{{- with $options.podDisruptionBudget -}}
{{- if and .enabled (gt $most 1) -}}
{{- if kindIs "invalid" .minAvailable -}}
{{- if not (toString .maxUnavailable | trimSuffix "%" | int) }}
{{ $.at }}.podDisruptionBudget.maxUnavailable: {{ .maxUnavailable }} would hold up every drain: set 1 or more
{{- end -}}
{{- else -}}
{{- $count := toString .minAvailable | trimSuffix "%" | int -}}
{{- if toString .minAvailable | hasSuffix "%" -}}
{{- /* Kubernetes rounds up. */ -}}
{{- $count = div (add (mul $count $least) 99) 100 | int -}}
{{- end -}}
{{- if ge $count $least }}
{{ $.at }}.podDisruptionBudget.minAvailable: {{ .minAvailable }} of {{ $least }} pods would hold up every drain: set less, or maxUnavailable
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The name from which all others are made. */}}
{{- define "lockstep.validate.names" -}}
{{- $name := include "lockstep.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{ quote $name }}, of the release's name or fullnameOverride, can't begin the name of a Service: it has to be of a-z, 0-9 and - between them, and begin with a letter
{{- else if gt (len $name) 55 }}
{{ $name }} is too long to begin every name: {{ len $name }} characters, 55 at most. Use a shorter release name, or fullnameOverride
{{- end -}}
{{- end -}}
