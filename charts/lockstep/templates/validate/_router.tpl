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
{{- if eq (int $router.service.port) (int $router.service.grpcPort) }}
router.service.grpcPort: {{ $router.service.grpcPort }} is router.service.port too: a Service needs two ports
{{- end -}}
{{- include "lockstep.validate.router.limitsStorage" . -}}
{{- include "lockstep.validate.router.memory" . -}}
{{- include "lockstep.validate.router.policies" . -}}
{{- $here := dict "root" . "at" "router" "options" $router "owned" "router" -}}
{{- include "lockstep.validate.settings" $here -}}
{{- include "lockstep.validate.grace" $here -}}
{{- include "lockstep.validate.disruption" $here -}}
{{- end -}}

{{- define "lockstep.validate.router.limitsStorage" -}}
{{- with .Values.router.limitsStorage.address -}}
{{- if contains "@" . }}
router.limitsStorage.address must have no user and no password: use router.limitsStorage.passwordSecretName
{{- end -}}
{{- if and $.Values.router.limitsStorage.caSecretName (not (hasPrefix "rediss:" .)) }}
router.limitsStorage.caSecretName is set, but router.limitsStorage.address does not begin with rediss: the connection would be plain text
{{- end -}}
{{- if and $.Values.networkPolicy.enabled (not $.Values.networkPolicy.routerEgress) }}
networkPolicy.routerEgress is empty: routers could not reach the Redis of router.limitsStorage, and each would count by itself. List its addresses and ports, or set networkPolicy.enabled to false
{{- end -}}
{{- include "lockstep.validate.router.separateRedis" $ -}}
{{- end -}}
{{- end -}}

{{/* Routers log in as Redis's user `default`: what that one may read of the state server's they could read. Databases are no border. */}}
{{- define "lockstep.validate.router.separateRedis" -}}
{{- $state := .Values.state -}}
{{- if and $state.enabled (eq $state.backend "redis") $state.redis.url (has $state.redis.username (list "" "default")) -}}
{{- $own := include "lockstep.validate.servers" .Values.router.limitsStorage.address | fromYamlArray -}}
{{- range include "lockstep.validate.servers" $state.redis.url | fromYamlArray -}}
{{- if has . $own }}
router.limitsStorage.address: {{ . }} is the Redis of state.redis.url, where the state server is the user `default` as routers are: they could read and write all journals. Use another Redis, or give the state server a user of its own, state.redis.username
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The servers in an address of Redis, each with its port: a list in YAML. Takes the address. */}}
{{- define "lockstep.validate.servers" -}}
{{- range regexReplaceAll "^[^/]*//|[/?].*$" (lower .) "" | splitList "," }}
- {{ regexMatch ":[0-9]+$" . | ternary . (printf "%s:6379" .) | quote }}
{{- end -}}
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

{{/* Only another image, or what is mounted into the router, can bring a policy: here a name that is not built in is a mistake. */}}
{{- define "lockstep.validate.router.policies" -}}
{{- $router := .Values.router -}}
{{- $isOurs := and (eq $router.image.repository "lockstep/router") (not $router.image.tag) (not $router.image.digest) -}}
{{- if and $isOurs (not $router.extraVolumeMounts) -}}
{{- range $setting, $policy := include "lockstep.router.otherPolicies" . | fromYaml }}
router.settings.{{ $setting }}: {{ quote $policy }} is none of {{ include "lockstep.router.builtInPolicies" $ | replace " " ", " }}. A policy of your own needs a router with its package: set router.image.tag, or router.extraVolumeMounts
{{- end -}}
{{- end -}}
{{- end -}}
