{{/* Values that follow from a model's options. All take (root, model), where model is an entry of "lockstep.models". */}}

{{/* The kind of its source, the one key of `source`. */}}
{{- define "lockstep.model.source" -}}
{{- keys .model.source | sortAlpha | first -}}
{{- end -}}

{{/* The directory that the worker reads. */}}
{{- define "lockstep.model.directory" -}}
{{- $kind := include "lockstep.model.source" . -}}
{{- if eq $kind "path" -}}
{{- .model.source.path -}}
{{- else if and (eq $kind "image") (eq .model.source.image.mode "mount") -}}
{{- printf "/model/%s" (trimAll "/" .model.source.image.path) | trimSuffix "/" -}}
{{- else if eq $kind "persistentVolumeClaim" -}}
{{- printf "/model/%s" (trimAll "/" (.model.source.persistentVolumeClaim.path | default "")) | trimSuffix "/" -}}
{{- else -}}
/model
{{- end -}}
{{- end -}}

{{/*
Least size of /dev/shm. NCCL moves tensors between the ranks of a pod through it wherever GPUs have no direct path: some 10 MB a
channel and neighbour. NVIDIA asks for 1 GiB for a container (NCCL user guide, "Troubleshooting", "Sharing Data"; eight
GPUs a node at the time); a container's default is 64 MiB, with which NCCL ends with "No space left on device". So:
1 GiB for up to four ranks, 256 MiB for each. Ranks on the CPU use anonymous memory, and a single rank does not communicate: 64 MiB.
*/}}
{{- define "lockstep.model.leastShm" -}}
{{- if and (eq .model.device "cuda") (gt (int .model.tp) 1) -}}
{{- mul 268435456 (max 4 (int .model.tp)) -}}
{{- else -}}
67108864
{{- end -}}
{{- end -}}

{{- define "lockstep.model.shm" -}}
{{- if .model.shmSize -}}
{{- include "lockstep.bytes" .model.shmSize -}}
{{- else -}}
{{- include "lockstep.model.leastShm" . -}}
{{- end -}}
{{- end -}}

{{/*
The worker container's resources: the given ones, with GPUs, and with /dev/shm on top of the memory: its pages count as the
container's, so a limit without them could be exceeded.
*/}}
{{- define "lockstep.model.resources" -}}
{{- $resources := deepCopy .model.resources -}}
{{- $shm := include "lockstep.model.shm" . | int64 -}}
{{- range $kind := list "requests" "limits" -}}
{{- $of := get $resources $kind | default dict -}}
{{- if hasKey $of "memory" -}}
{{- $_ := set $of "memory" (include "lockstep.quantity" (add (include "lockstep.bytes" $of.memory) $shm)) -}}
{{- end -}}
{{- if eq $.model.device "cuda" -}}
{{- $_ := set $of $.root.Values.gpu.resourceName (int $.model.tp) -}}
{{- end -}}
{{- if $of -}}
{{- $_ := set $resources $kind $of -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The worker's settings: what the chart decides, over what the model's `settings` say. validate/ refuses the chart's keys there. */}}
{{- define "lockstep.model.settings" -}}
{{- $settings := deepCopy .model.settings -}}
{{- $_ := set $settings "model" (include "lockstep.model.directory" .) -}}
{{- $_ := set $settings "name" (.model.servedName | default .model.name) -}}
{{- $_ := set $settings "listen" (include "lockstep.listen" (dict "root" .root "port" 9000)) -}}
{{- $_ := set $settings "management_host" (include "lockstep.listenAddress" .root) -}}
{{- $_ := set $settings "management_port" 9001 -}}
{{- $_ := set $settings "tp" (int .model.tp) -}}
{{- $_ := set $settings "device" .model.device -}}
{{- /* A rollout of routers may have twice as many for a moment. It is a bound that costs nothing, and a new one rolls all workers: so it is
the same for up to 32 routers. */ -}}
{{- if not (hasKey $settings "max_routers") -}}
{{- $_ := set $settings "max_routers" (max 64 (mul 2 (include "lockstep.router.most" .root | int))) -}}
{{- end -}}
{{- $_ := set $settings "kubernetes_events" .root.Values.worker.events -}}
{{- include "lockstep.tls.settings" (dict "root" .root "settings" $settings "peer" "router") -}}
{{- if .root.Values.worker.remoteCache.enabled -}}
{{- include "lockstep.state.callerSettings" (dict "root" .root "settings" $settings) -}}
{{- end -}}
{{- include "lockstep.tracing.settings" (dict "root" .root "settings" $settings) -}}
{{- toYaml $settings -}}
{{- end -}}

{{- define "lockstep.model.image" -}}
{{- include "lockstep.image" (dict "root" .root "image" .model.image "suffix" (printf "-%s" .model.device)) -}}
{{- end -}}

{{/*
The text of a variable of `nccl`. NCCL reads whole numbers: of Go's 8.388608e+06 it would take the 8, and of true 0. Takes the value.
*/}}
{{- define "lockstep.model.ncclValue" -}}
{{- if kindIs "bool" . -}}
{{- ternary 1 0 . -}}
{{- else if kindIs "string" . -}}
{{- . -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{/* Tolerations that come with the device: nodes with GPUs are usually kept free of all else by this taint. */}}
{{- define "lockstep.model.tolerations" -}}
{{- if eq .model.device "cuda" }}
- key: {{ .root.Values.gpu.resourceName }}
  operator: Exists
  effect: NoSchedule
{{- end }}
{{- end -}}
