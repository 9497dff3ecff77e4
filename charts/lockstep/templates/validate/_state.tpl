{{/* Mistakes across the state server's fields: one message a line, or nothing. */}}
{{- define "lockstep.validate.state" -}}
{{- $state := .Values.state -}}
{{- $here := dict "root" . "at" "state" "options" $state "owned" "state" -}}
{{- include "lockstep.validate.settings" $here -}}
{{- if and .Values.worker.remoteCache.enabled (not $state.enabled) }}
worker.remoteCache.enabled: workers keep blocks in the state server; set state.enabled
{{- end -}}
{{- if $state.enabled -}}
{{- include "lockstep.validate.grace" $here -}}
{{- include "lockstep.validate.disruption" $here -}}
{{- include "lockstep.validate.state.memory" . -}}
{{- if include "lockstep.state.usesRedis" . -}}
{{- include "lockstep.validate.state.scaling" . -}}
{{- include "lockstep.validate.state.redis" . -}}
{{- else -}}
{{- include "lockstep.validate.state.single" . -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a Redis makes possible is refused without one, or it would be believed to hold. */}}
{{- define "lockstep.validate.state.single" -}}
{{- $state := .Values.state -}}
{{- if ne (int $state.replicas) 1 }}
state.replicas: {{ $state.replicas }} pods would have {{ $state.replicas }} memories: with state.backend memory there is one; for more set state.backend to redis
{{- end -}}
{{- if $state.autoscaling.enabled }}
state.autoscaling.enabled: with state.backend memory there is one pod; for more set state.backend to redis
{{- end -}}
{{- range $name, $given := dict "url" $state.redis.url "existingSecret" $state.redis.existingSecret "bundled.enabled" $state.redis.bundled.enabled -}}
{{- if $given }}
state.redis.{{ $name }} is set, but state.backend is memory: set it to redis
{{- end -}}
{{- end -}}
{{- if $state.encryption.existingSecret }}
state.encryption.existingSecret: values are encrypted in Redis, and state.backend is memory, which writes nothing
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.state.scaling" -}}
{{- with .Values.state.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
state.autoscaling: minReplicas {{ .minReplicas }} is more than maxReplicas {{ .maxReplicas }}
{{- end -}}
{{- if and .enabled (not ($.Values.state.resources.requests).cpu) }}
state.autoscaling counts in state.resources.requests.cpu, which is not set
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.state.redis" -}}
{{- $redis := .Values.state.redis -}}
{{- if $redis.bundled.enabled -}}
{{- range $name, $given := dict "url" $redis.url "existingSecret" $redis.existingSecret "username" $redis.username "sentinelSecret" $redis.sentinelSecret "tls.caSecret" $redis.tls.caSecret "tls.clientSecret" $redis.tls.clientSecret -}}
{{- if $given }}
state.redis.{{ $name }} is of a Redis of yours, and state.redis.bundled.enabled takes the chart's: set one of the two
{{- end -}}
{{- end -}}
{{- if not (include "lockstep.bytes" ($redis.bundled.resources.limits).memory) }}
state.redis.bundled.resources.limits.memory has to be a number of bytes: Redis may take half of it
{{- end -}}
{{- else -}}
{{- if not (or $redis.url $redis.existingSecret) }}
state.redis: with state.backend redis it needs url, existingSecret with the key `url`, or bundled.enabled
{{- end -}}
{{- if contains "@" $redis.url }}
state.redis.url must have no user and no password: use state.redis.username and state.redis.existingSecret
{{- end -}}
{{- if and $redis.url (or $redis.tls.caSecret $redis.tls.clientSecret) (not (hasPrefix "rediss" $redis.url)) }}
state.redis.tls is set, but state.redis.url does not begin with rediss: the connection would be plain text
{{- end -}}
{{- if and $redis.url $redis.sentinelSecret (not (contains "+sentinel://" $redis.url)) }}
state.redis.sentinelSecret is set, but state.redis.url does not begin with redis+sentinel:// or rediss+sentinel://
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.stateEgress) }}
networkPolicy.stateEgress is empty: the state server could not reach Redis. List its addresses and ports, or set networkPolicy.enabled to false
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.state.memory" -}}
{{- range $kind := list "limits" "requests" -}}
{{- with (get $.Values.state.resources $kind | default dict).memory -}}
{{- if not (include "lockstep.bytes" .) }}
state.resources.{{ $kind }}.memory: {{ . }} is no number of bytes: write 512Mi, 2Gi or 1.5G
{{- end -}}
{{- end -}}
{{- end -}}
{{- with include "lockstep.state.memory" . | int64 -}}
{{- $given := include "lockstep.bytes" $.Values.state.resources.limits.memory | int64 -}}
{{- $least := add 134217728 . -}}
{{- if lt $given $least }}
state.resources.limits.memory: {{ $.Values.state.resources.limits.memory }} is less than {{ include "lockstep.quantity" $least }} = 128Mi + settings.max_memory_bytes {{ include "lockstep.quantity" . }}: the kernel would kill the state server before it evicts. Raise the limit (256Mi at least), or set less
{{- end -}}
{{- end -}}
{{- end -}}
