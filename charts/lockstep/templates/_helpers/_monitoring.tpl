{{/* Labels that every metric gets: `release` and, with workers, `model`. Rules and dashboards select by them. */}}

{{- define "lockstep.relabelings" -}}
- {sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_instance], targetLabel: release}
- {sourceLabels: [__meta_kubernetes_pod_label_lockstep_dev_model], targetLabel: model}
{{- end -}}

{{/* Where traces go. Takes (root, settings); adds to a service's settings what these do not say themselves. */}}
{{- define "lockstep.tracing.settings" -}}
{{- with .root.Values.tracing -}}
{{- if .endpoint -}}
{{- $ours := dict "otlp_endpoint" .endpoint "otlp_protocol" .protocol "trace_ratio" .ratio "trace_slow_s" .slowSeconds -}}
{{- range $name, $value := $ours -}}
{{- if not (hasKey $.settings $name) -}}
{{- $_ := set $.settings $name $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
