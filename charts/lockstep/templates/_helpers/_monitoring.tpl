{{/* Labels that every metric gets: `release` and, with workers, `model`. Rules and dashboards select by them. */}}

{{- define "lockstep.relabelings" -}}
- {sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_instance], targetLabel: release}
- {sourceLabels: [__meta_kubernetes_pod_label_lockstep_dev_model], targetLabel: model}
{{- end -}}
