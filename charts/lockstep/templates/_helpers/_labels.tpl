{{/* Labels and annotations. They take (root, component) and, where something belongs to one model, (model). */}}

{{/* What selects pods: immutable in Deployments and StatefulSets, so nothing else may ever join. */}}
{{- define "lockstep.selectorLabels" -}}
app.kubernetes.io/name: {{ include "lockstep.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model }}
lockstep.dev/model: {{ .name | quote }}
{{- end }}
{{- end -}}

{{/* Takes (labels?) besides: the object's own, which replace those of commonLabels. */}}
{{- define "lockstep.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "lockstep.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with mergeOverwrite (deepCopy (.root.Values.commonLabels | default dict)) (.labels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Without the chart's version: an upgrade of the chart alone restarts nothing. */}}
{{- define "lockstep.podLabels" -}}
{{ include "lockstep.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- $scraped := include "lockstep.scrapeLabels" . | fromYaml }}
{{- with mergeOverwrite $scraped (deepCopy (.root.Values.commonLabels | default dict)) (.labels | default dict) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes (root, annotations, port?): a pod's number of its port `management`. */}}
{{- define "lockstep.annotations" -}}
{{- $scraped := include "lockstep.scrapeAnnotations" . | fromYaml -}}
{{- with mergeOverwrite $scraped (deepCopy (.root.Values.commonAnnotations | default dict)) (.annotations | default dict) -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* `metadata:` of an object of the release. Takes (root, component, name, model?, labels?, annotations?). */}}
{{- define "lockstep.metadata" -}}
metadata:
  name: {{ .name | quote }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "lockstep.labels" . | nindent 4 }}
  {{- with include "lockstep.annotations" . }}
  annotations:
    {{- . | nindent 4 }}
  {{- end }}
{{- end -}}
