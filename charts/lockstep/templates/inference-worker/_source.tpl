{{/* Where a model's files come from: its volume, and the init container that fills it. All take (root, model). */}}

{{- define "lockstep.model.volume" -}}
{{- $kind := include "lockstep.model.source" . -}}
{{- $source := get .model.source $kind -}}
{{- if eq $kind "persistentVolumeClaim" }}
- name: model
  persistentVolumeClaim: {claimName: {{ $source.claimName }}, readOnly: true}
{{- else if eq $kind "hostPath" }}
- name: model
  hostPath: {path: {{ $source.path }}, type: Directory}
{{- else if and (eq $kind "image") (eq $source.mode "mount") }}
- name: model
  image:
    reference: {{ include "lockstep.image" (dict "root" .root "image" $source) }}
    pullPolicy: {{ include "lockstep.pullPolicy" (dict "root" .root "image" $source) }}
{{- else if or (eq $kind "image") (and (eq $kind "fetch") (not ($source.volumeClaim).storage)) }}
- name: model
  emptyDir:
    {{- with $source.sizeLimit }}
    sizeLimit: {{ . }}
    {{- else }} {}
    {{- end }}
{{- end }}
{{- end -}}

{{- define "lockstep.model.volumeMount" -}}
{{- if ne (include "lockstep.model.source" .) "path" }}
- {name: model, mountPath: /model, readOnly: true}
{{- end }}
{{- end -}}

{{/* A claim a pod, for fetched files that shall outlive it. */}}
{{- define "lockstep.model.volumeClaim" -}}
{{- with (.model.source.fetch).volumeClaim }}
{{- if .storage }}
# Fetched files go with the release, and stay when a pod goes.
persistentVolumeClaimRetentionPolicy: {whenDeleted: Delete, whenScaled: Retain}
volumeClaimTemplates:
  - metadata:
      name: model
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .storage }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "lockstep.model.initContainer" -}}
{{- $kind := include "lockstep.model.source" . -}}
{{- $source := get .model.source $kind -}}
{{- if and (eq $kind "image") (ne $source.mode "mount") }}
- name: model-copy
  image: {{ include "lockstep.image" (dict "root" .root "image" $source) }}
  imagePullPolicy: {{ include "lockstep.pullPolicy" (dict "root" .root "image" $source) }}
  command: [cp, -RL, {{ printf "%s/." (trimSuffix "/" $source.path) | quote }}, /copy/]
{{- else if eq $kind "fetch" }}
- name: model-fetch
  {{- with $source.image }}
  image: {{ include "lockstep.image" (dict "root" $.root "image" .) }}
  imagePullPolicy: {{ include "lockstep.pullPolicy" (dict "root" $.root "image" .) }}
  {{- else }}
  image: {{ include "lockstep.model.image" . }}
  imagePullPolicy: {{ include "lockstep.pullPolicy" (dict "root" .root "image" .model.image) }}
  {{- end }}
  {{- if $source.command }}
  command:
    {{- toYaml $source.command | nindent 4 }}
  {{- else }}
  command:
    - python
    - -c
    - |
      from os import environ
      from huggingface_hub import snapshot_download
      snapshot_download(environ["MODEL_REPOSITORY"], revision=environ["MODEL_REVISION"], local_dir="/model",
                        allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"])
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /tmp/huggingface}
    - {name: HF_HUB_OFFLINE, value: "0"}
    {{- with $source.repository }}
    - {name: MODEL_REPOSITORY, value: {{ . | quote }}}
    - {name: MODEL_REVISION, value: {{ $source.revision | default "main" | quote }}}
    {{- end }}
    {{- with $source.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $source.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- if or (eq $kind "fetch") (and (eq $kind "image") (ne $source.mode "mount")) }}
  securityContext:
    {{- toYaml .model.securityContext | nindent 4 }}
  # The worker's own, which it does not use yet: they cost nothing, and namespaces with quotas ask for some.
  resources:
    {{- toYaml .model.resources | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
    # Not over the files to be copied, which may well be in the image's own /model.
    - {name: model, mountPath: {{ eq $kind "image" | ternary "/copy" "/model" }}}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}
