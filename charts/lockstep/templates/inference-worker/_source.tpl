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

{{/* A claim for each pod, so that fetched files outlive it. */}}
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
      from json import loads
      from os import environ
      from pathlib import Path
      from huggingface_hub import snapshot_download
      files = loads(environ["MODEL_SHA256"])
      # A volume claim may still hold files of another revision, which model-verify would refuse.
      for path in Path("/model").rglob("*"):
          name = path.relative_to("/model")
          if name.parts[0] not in (".cache", "lost+found") and str(name) not in files and (path.is_symlink() or path.is_file()):
              path.unlink()
      snapshot_download(environ["MODEL_REPOSITORY"], revision=environ["MODEL_REVISION"], local_dir="/model", allow_patterns=list(files))
  {{- end }}
  env:
    - {name: HOME, value: /tmp}
    - {name: HF_HOME, value: /tmp/huggingface}
    - {name: HF_HUB_OFFLINE, value: "0"}
    {{- with $source.repository }}
    - {name: MODEL_REPOSITORY, value: {{ . | quote }}}
    - {name: MODEL_REVISION, value: {{ $source.revision | quote }}}
    - {name: MODEL_SHA256, value: {{ toJson $source.sha256 | quote }}}
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
  {{- include "lockstep.model.initRest" (merge (dict "mount" (eq $kind "image" | ternary "/copy" "/model")) .) | nindent 2 }}
{{- end }}
{{- if eq $kind "fetch" }}
- name: model-verify
  image: {{ include "lockstep.model.image" . }}
  imagePullPolicy: {{ include "lockstep.pullPolicy" (dict "root" .root "image" .model.image) }}
  # A file with another digest is removed, so that the next start fetches it again. A file that is not listed is refused: a chat template
  # or a shard more would change the model. The exceptions are files that no worker reads.
  command:
    - python
    - -c
    - |
      from concurrent.futures import ThreadPoolExecutor
      from hashlib import file_digest
      from json import loads
      from os import environ, remove, walk
      from os.path import islink, join, relpath
      from sys import exit
      MODEL = "/model"
      UNREAD = {".gitattributes", "LICENSE", "LICENSE.md", "LICENSE.txt", "README", "README.md", "README.txt"}
      UNREAD_DIRECTORIES = {".cache", "lost+found"}
      def found_files():
          for directory, directories, files in walk(MODEL):
              links = [name for name in directories if islink(join(directory, name))]
              yield from (relpath(join(directory, name), MODEL) for name in files + links)
              if directory == MODEL:
                  directories[:] = [name for name in directories if name not in UNREAD_DIRECTORIES]
      def fault(entry):
          path, wanted = join(MODEL, entry[0]), entry[1]
          try:
              with open(path, "rb") as file:
                  found = file_digest(file, "sha256").hexdigest()
          except OSError as error:
              return f"{entry[0]}: {error.strerror}"
          if found == wanted:
              return None
          remove(path)
          return f"{entry[0]} has sha256 {found}, not {wanted}"
      sums = loads(environ["MODEL_SHA256"])
      faults = [f"{name} is not listed" for name in sorted(found_files()) if name not in sums and name not in UNREAD]
      faults += [each for each in ThreadPoolExecutor(4).map(fault, sums.items()) if each]
      exit("the model is not the one of source.fetch.sha256: " + "; ".join(faults) if faults else 0)
  env:
    - {name: MODEL_SHA256, value: {{ toJson $source.sha256 | quote }}}
  {{- include "lockstep.model.initRest" (merge (dict "mount" "/model") .) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The end of an init container. Takes (mount) beside (root, model). */}}
{{- define "lockstep.model.initRest" -}}
securityContext:
  {{- toYaml .model.securityContext | nindent 2 }}
# The worker's own, which it does not use yet: they cost nothing, and namespaces with quotas ask for some.
resources:
  {{- toYaml .model.resources | nindent 2 }}
terminationMessagePolicy: FallbackToLogsOnError
volumeMounts:
  # Not over the files to be copied, which may well be in the image's own /model.
  - {name: model, mountPath: {{ .mount }}}
  - {name: tmp, mountPath: /tmp}
{{- end -}}
