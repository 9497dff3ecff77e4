{{/* When to pull an image. Takes (root, image). */}}
{{- define "lockstep.pullPolicy" -}}
{{- .root.Values.global.imagePullPolicy | default .image.pullPolicy | default "IfNotPresent" -}}
{{- end -}}

{{/* An image's reference. Takes (root, image, suffix?): the suffix goes behind the chart's appVersion, not behind a tag that was given. */}}
{{- define "lockstep.image" -}}
{{- $registry := default .image.registry .root.Values.global.imageRegistry -}}
{{- $tag := default (printf "%s%s" .root.Chart.AppVersion (.suffix | default "")) .image.tag -}}
{{- with $registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end -}}
