{{/* Values that follow from `state`. All take the root context. */}}

{{/* The largest number of state servers, except during a rollout. */}}
{{- define "lockstep.state.most" -}}
{{- ternary .Values.state.autoscaling.maxReplicas .Values.state.replicas .Values.state.autoscaling.enabled -}}
{{- end -}}

{{/* Whether they keep everything in a Redis. Empty or not. */}}
{{- define "lockstep.state.usesRedis" -}}
{{- eq .Values.state.backend "redis" | ternary "true" "" -}}
{{- end -}}

{{/* Whether that is the Redis of this chart. Empty or not. */}}
{{- define "lockstep.state.isBundled" -}}
{{- and (eq .Values.state.backend "redis") .Values.state.redis.bundled.enabled | ternary "true" "" -}}
{{- end -}}

{{/* The Secret with the password of Redis; empty if there is none. */}}
{{- define "lockstep.state.passwordSecret" -}}
{{- if include "lockstep.state.isBundled" . -}}
{{- include "lockstep.redis.name" . -}}
{{- else if include "lockstep.state.usesRedis" . -}}
{{- .Values.state.redis.existingSecret -}}
{{- end -}}
{{- end -}}

{{/*
What the memory backend may hold: as it is set, or half of the memory limit, so that entries are evicted before the kernel kills the
process. Nothing without a limit, and nothing with Redis.
*/}}
{{- define "lockstep.state.memory" -}}
{{- if not (include "lockstep.state.usesRedis" .) -}}
{{- with (.Values.state.resources.limits).memory | include "lockstep.bytes" | int64 -}}
{{- $.Values.state.settings.max_memory_bytes | default (div . 2) | int64 -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The state server's settings: those that the chart sets, and `state.settings`. validate/ refuses the chart's keys there. */}}
{{- define "lockstep.state.settings" -}}
{{- $state := .Values.state -}}
{{- $settings := deepCopy $state.settings -}}
{{- $_ := set $settings "listen" (include "lockstep.listen" (dict "root" . "port" 9100)) -}}
{{- $_ := set $settings "management_host" (include "lockstep.listenAddress" .) -}}
{{- $_ := set $settings "management_port" 9101 -}}
{{- with include "lockstep.state.memory" . -}}
{{- $_ := set $settings "max_memory_bytes" (int64 .) -}}
{{- end -}}
{{- if include "lockstep.state.usesRedis" . -}}
{{- include "lockstep.state.redisSettings" (dict "root" . "settings" $settings) -}}
{{- end -}}
{{- include "lockstep.tls.settings" (dict "root" . "settings" $settings "peer" "router") -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $settings "worker_identity" (include "lockstep.tls.worker.identity" .) -}}
{{- end -}}
{{- include "lockstep.tracing.settings" (dict "root" . "settings" $settings) -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Those of routers and workers that call it. Takes (root, settings); changes the settings. */}}
{{- define "lockstep.state.callerSettings" -}}
{{- $_ := set .settings "state_server" (printf "%s.%s.svc:9100" (include "lockstep.state.name" .root) .root.Release.Namespace) -}}
{{- if .root.Values.tls.enabled -}}
{{- $_ := set .settings "state_identity" (include "lockstep.tls.state.identity" .root) -}}
{{- end -}}
{{- end -}}

{{/* Those about Redis. Takes (root, settings); changes the settings. An address that is in a Secret is an environment variable. */}}
{{- define "lockstep.state.redisSettings" -}}
{{- $redis := .root.Values.state.redis -}}
{{- if include "lockstep.state.isBundled" .root -}}
{{- $_ := set .settings "store" (printf "redis://%s.%s.svc:6379/0" (include "lockstep.redis.name" .root) .root.Release.Namespace) -}}
{{- $_ := set .settings "store_username" "lockstep" -}}
{{- else -}}
{{- with $redis.url -}}
{{- $_ := set $.settings "store" . -}}
{{- end -}}
{{- with $redis.username -}}
{{- $_ := set $.settings "store_username" . -}}
{{- end -}}
{{- if $redis.tls.caSecret -}}
{{- $_ := set .settings "store_ca" "/etc/lockstep-redis-ca/ca.crt" -}}
{{- end -}}
{{- if $redis.tls.clientSecret -}}
{{- $_ := set .settings "store_cert" "/etc/lockstep-redis-client/tls.crt" -}}
{{- $_ := set .settings "store_key" "/etc/lockstep-redis-client/tls.key" -}}
{{- end -}}
{{- if $redis.sentinelSecret -}}
{{- $_ := set .settings "store_sentinel_password_file" "/etc/lockstep-sentinel/password" -}}
{{- end -}}
{{- end -}}
{{- if include "lockstep.state.passwordSecret" .root -}}
{{- $_ := set .settings "store_password_file" "/etc/lockstep-redis/password" -}}
{{- end -}}
{{- if .root.Values.state.encryption.existingSecret -}}
{{- $_ := set .settings "encryption_key_file" "/etc/lockstep-encryption/keys" -}}
{{- end -}}
{{- end -}}

{{/* The files with passwords, keys and certificates: a list of (name, path, secret, items). */}}
{{- define "lockstep.state.files" -}}
{{- $redis := .Values.state.redis -}}
{{- $files := list -}}
{{- if .Values.tls.enabled -}}
{{- $files = append $files (dict "name" "tls" "path" "/etc/lockstep-tls" "secret" (include "lockstep.tls.state.secret" .)) -}}
{{- end -}}
{{- if include "lockstep.state.usesRedis" . -}}
{{- with include "lockstep.state.passwordSecret" . -}}
{{- $files = append $files (dict "name" "redis" "path" "/etc/lockstep-redis" "secret" . "items" (list "password")) -}}
{{- end -}}
{{- with .Values.state.encryption.existingSecret -}}
{{- $files = append $files (dict "name" "encryption" "path" "/etc/lockstep-encryption" "secret" . "items" (list "keys")) -}}
{{- end -}}
{{- if not (include "lockstep.state.isBundled" .) -}}
{{- with $redis.tls.caSecret -}}
{{- $files = append $files (dict "name" "redis-ca" "path" "/etc/lockstep-redis-ca" "secret" . "items" (list "ca.crt")) -}}
{{- end -}}
{{- with $redis.tls.clientSecret -}}
{{- $files = append $files (dict "name" "redis-client" "path" "/etc/lockstep-redis-client" "secret" . "items" (list "tls.crt" "tls.key")) -}}
{{- end -}}
{{- with $redis.sentinelSecret -}}
{{- $files = append $files (dict "name" "sentinel" "path" "/etc/lockstep-sentinel" "secret" . "items" (list "password")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $files -}}
{{- end -}}

{{/*
The password of the bundled Redis: the installed one, or a new random one. Made once for each rendering: it is remembered among the
values. Renderings without a cluster (`helm template`) have another one each time; the pods' annotations follow it, so they stay in step.
*/}}
{{- define "lockstep.redis.password" -}}
{{- $bundled := .Values.state.redis.bundled -}}
{{- if not (hasKey $bundled "password") -}}
{{- $name := include "lockstep.redis.name" . -}}
{{- $present := (lookup "v1" "Secret" .Release.Namespace $name).data | default dict -}}
{{- $_ := set $bundled "password" (get $present "password" | b64dec | default (randAlphaNum 32)) -}}
{{- end -}}
{{- $bundled.password -}}
{{- end -}}

{{/* The bundled Redis' configuration. The state server's user can do what it needs, on its own keys. Nobody else can log in. */}}
{{- define "lockstep.redis.configuration" -}}
{{- $prefix := .Values.state.settings.store_prefix | default "lockstep:" -}}
port 6379
bind * -::*
protected-mode no
dir /tmp
save ""
appendonly no
maxmemory {{ div (include "lockstep.bytes" .Values.state.redis.bundled.resources.limits.memory | int64) 2 }}
maxmemory-policy noeviction
user default off
user lockstep on #{{ include "lockstep.redis.password" . | sha256sum }} {{ printf "~%s*" $prefix | quote }} +@read +@write +@scripting +@connection +time -@dangerous +info
{{- end -}}
