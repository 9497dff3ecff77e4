{{/* Mistakes across the fields of models: one message a line, or nothing. All but the first take (root, model, at). */}}

{{- define "lockstep.validate.models" -}}
{{- $seen := dict -}}
{{- range $index, $given := .Values.models -}}
{{- $at := printf "models[%d]" $index }}
{{- if not $given.name }}
{{ $at }}.name is missing: a model needs one
{{- else if hasKey $seen $given.name }}
{{ $at }}.name: {{ quote $given.name }} is the name of {{ get $seen $given.name }} too
{{- end }}
{{- $_ := set $seen ($given.name | default "") $at }}
{{- end -}}
{{- range $index, $model := include "lockstep.models" . | fromYamlArray -}}
{{- $here := dict "root" $ "model" $model "at" (printf "models[%d]" $index) "options" $model -}}
{{- range list "name" "source" "ranks" "memory" "shm" "settings" "remoteCache" "routers" "scaling" -}}
{{- include (printf "lockstep.validate.model.%s" .) $here -}}
{{- end -}}
{{- include "lockstep.validate.settings" (merge (dict "owned" "worker") $here) -}}
{{- include "lockstep.validate.grace" $here -}}
{{- include "lockstep.validate.disruption" $here -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.name" -}}
{{- with .model.name -}}
{{- $name := include "lockstep.model.name" $ -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$" .) }}
{{ $.at }}.name: {{ quote . }} is no DNS label (a-z, 0-9 and - between them); it becomes part of pods' names. What clients call the model is servedName
{{- else if gt (len $name) 52 }}
{{ $.at }}.name: {{ $name }}, the StatefulSet's name, has {{ len $name }} characters; Kubernetes can take 52, for it puts them in a label with a hash of 11. Shorten the model's name, or set fullnameOverride
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.source" -}}
{{- $kinds := keys (.model.source | default dict) | sortAlpha -}}
{{- if eq (len $kinds) 0 }}
{{ .at }}.source is missing: it has to be one of path, image, persistentVolumeClaim, hostPath, fetch
{{- else if gt (len $kinds) 1 }}
{{ .at }}.source has {{ join " and " $kinds }}: a model comes from one place
{{- else if .model.source.fetch -}}
{{- $fetch := .model.source.fetch -}}
{{- if eq (empty $fetch.repository) (empty $fetch.command) }}
{{ .at }}.source.fetch needs either repository or command
{{- else if and $fetch.repository (not (regexMatch "^[0-9a-f]{40}$" ($fetch.revision | default ""))) }}
{{ .at }}.source.fetch.revision has to be a commit of {{ $fetch.repository }} (40 hexadecimal digits): a branch or a tag may be another model tomorrow
{{- end -}}
{{- if not $fetch.sha256 }}
{{ .at }}.source.fetch.sha256 is missing: every fetched file is checked against it, and only those are fetched
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.ranks" -}}
{{- $resource := .root.Values.gpu.resourceName -}}
{{- $tp := int .model.tp -}}
{{- range $kind := list "limits" "requests" -}}
{{- $of := get $.model.resources $kind | default dict -}}
{{- if hasKey $of $resource -}}
{{- $gpus := get $of $resource | int -}}
{{- if eq $.model.device "cpu" }}
{{ $.at }}.resources.{{ $kind }} asks for {{ $resource }}, but device is cpu: set device: cuda, or ask for none
{{- else if ne $gpus $tp }}
{{ $.at }}.resources.{{ $kind }} asks for {{ $gpus }} {{ $resource }}, but tp is {{ $tp }}: each rank has one GPU. Set tp to {{ $gpus }}, or leave {{ $resource }} to the chart
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .root.Values.gpu.perNode -}}
{{- if and (eq $.model.device "cuda") (gt $tp (int .)) }}
{{ $.at }}.tp: {{ $tp }} ranks need {{ $tp }} GPUs of one node, and gpu.perNode says that a node has {{ . }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.memory" -}}
{{- range $kind := list "limits" "requests" -}}
{{- with (get $.model.resources $kind | default dict).memory -}}
{{- if not (include "lockstep.bytes" .) }}
{{ $.at }}.resources.{{ $kind }}.memory: {{ . }} is no number of bytes: write 512Mi, 2Gi or 1.5G
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.shm" -}}
{{- $least := include "lockstep.model.leastShm" . | int64 -}}
{{- if and .model.shmSize (not (include "lockstep.bytes" .model.shmSize)) }}
{{ .at }}.shmSize: {{ .model.shmSize }} is no number of bytes: write 512Mi, 2Gi or 1.5G
{{- else if and .model.shmSize (lt (include "lockstep.model.shm" . | int64) $least) }}
{{ .at }}.shmSize: {{ .model.shmSize }} is too small for {{ .model.tp }} ranks on {{ .model.device }}: {{ include "lockstep.quantity" $least }} at least, or leave it empty
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.settings" -}}
{{- with .model.settings.min_shm -}}
{{- if lt (include "lockstep.model.shm" $ | int64) (include "lockstep.bytes" (toString . | trim | trimSuffix "B") | int64) }}
{{ $.at }}.settings.min_shm: {{ . }} is more than the /dev/shm of {{ include "lockstep.quantity" (include "lockstep.model.shm" $) }} that shmSize comes to: the worker would not start
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.remoteCache" -}}
{{- if and .root.Values.worker.remoteCache.enabled (not .model.settings.host_cache_bytes) }}
{{ .at }}.settings.host_cache_bytes is not set, but worker.remoteCache.enabled is: blocks go to the state server from host memory, and come back to it
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.routers" -}}
{{- $most := include "lockstep.router.most" .root | int -}}
{{- with .model.settings.max_routers -}}
{{- if lt (int .) $most }}
{{ $.at }}.settings.max_routers: {{ . }} routers may connect, but there are up to {{ $most }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.validate.model.scaling" -}}
{{- $scaling := .model.autoscaling -}}
{{- if $scaling.enabled -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) }}
{{ .at }}.autoscaling: minReplicas {{ $scaling.minReplicas }} is more than maxReplicas {{ $scaling.maxReplicas }}
{{- end -}}
{{- if not (or (int $scaling.minReplicas) $scaling.triggers) }}
{{ .at }}.autoscaling.minReplicas is 0, but {{ .at }}.autoscaling.triggers has none: without a worker nothing tells of requests that wait, so there would never be one again
{{- end -}}
{{- if and (not (int $scaling.minReplicas)) (eq .root.Values.router.discovery "dns") (not (include "lockstep.validate.hasWorker" .root)) }}
{{ .at }}.autoscaling.minReplicas is 0, but router.discovery is dns, and no other model has a worker at all times: DNS knows no name without an address, so routers would not be ready, and no request would wait for a worker. Set router.discovery to kubernetes
{{- end -}}
{{- if not (.root.Capabilities.APIVersions.Has "keda.sh/v1alpha1") }}
{{ .at }}.autoscaling.enabled: the cluster has no keda.sh/v1alpha1; install KEDA first (with `helm template`: --api-versions keda.sh/v1alpha1)
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not empty if a model has a worker at all times. Takes the root context. */}}
{{- define "lockstep.validate.hasWorker" -}}
{{- range include "lockstep.models" . | fromYamlArray -}}
{{- if ternary .autoscaling.minReplicas .replicas .autoscaling.enabled | int }}yes{{ end -}}
{{- end -}}
{{- end -}}
