{{/*
Lays one map over another, in place: (under, over). Maps merge key by key, all else is replaced, also by null.
Sprig's merge functions are of no use here: they take false, 0 and "" for "not given".
*/}}
{{- define "lockstep.lay" -}}
{{- $under := .under -}}
{{- range $key, $value := .over -}}
{{- if and (kindIs "map" $value) (kindIs "map" (get $under $key)) -}}
{{- include "lockstep.lay" (dict "under" (get $under $key) "over" $value) -}}
{{- else -}}
{{- $_ := set $under $key $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The entries of `models`, each over `modelDefaults`, as a YAML list. */}}
{{- define "lockstep.models" -}}
{{- $models := list -}}
{{- range .Values.models -}}
{{- $model := deepCopy $.Values.modelDefaults -}}
{{- include "lockstep.lay" (dict "under" $model "over" (deepCopy .)) -}}
{{- $models = append $models $model -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}
