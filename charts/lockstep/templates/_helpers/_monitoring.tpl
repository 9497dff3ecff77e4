{{/* Labels that every metric gets: `release` and, with workers, `model`. Rules and dashboards select by them. */}}

{{- define "lockstep.relabelings" -}}
- {sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_instance], targetLabel: release}
- {sourceLabels: [__meta_kubernetes_pod_label_lockstep_dev_model], targetLabel: model}
{{- end -}}

{{/*
Whether pods say themselves how they are scraped: not where monitors of the operator do, or everything would be scraped twice by a
Prometheus that heeds both.
*/}}
{{- define "lockstep.isAnnotated" -}}
{{- $how := .Values.monitoring.scrapeAnnotations -}}
{{- if or (eq $how "always") (and (eq $how "auto") (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1"))) -}}
true
{{- end -}}
{{- end -}}

{{/* Annotations of a pod by which it is scraped. Takes (root, port?): the number of its port `management`; none has no metrics. */}}
{{- define "lockstep.scrapeAnnotations" -}}
{{- if and .port (include "lockstep.isAnnotated" .root) -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
prometheus.io/path: /metrics
prometheus.io/scheme: {{ if include "lockstep.tls.management" .root }}https{{ else }}http{{ end }}
{{- end -}}
{{- end -}}

{{/* Labels that the usual scrape by annotations gives to every metric of a pod, where monitors would add them. */}}
{{- define "lockstep.scrapeLabels" -}}
{{- if include "lockstep.isAnnotated" .root -}}
release: {{ .root.Release.Name | quote }}
{{- with .model }}
model: {{ .name | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Not empty if traces go to a collector, by these values alone. */}}
{{- define "lockstep.tracing.hasCollector" -}}
{{- with .Values.tracing.endpoint -}}
{{- if ne . "memory" }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{/*
Not empty if a service sends traces to a collector: its own settings and variables may name one, too. Takes (root, options): the values of the
service or of a model.
*/}}
{{- define "lockstep.tracing.sends" -}}
{{- $settings := .options.settings -}}
{{- $endpoint := hasKey $settings "otlp_endpoint" | ternary $settings.otlp_endpoint .root.Values.tracing.endpoint -}}
{{- if not $endpoint -}}
{{- range .options.env -}}
{{- if has .name (list "OTEL_EXPORTER_OTLP_ENDPOINT" "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") }}yes{{ end -}}
{{- end -}}
{{- else if ne $endpoint "memory" -}}
yes
{{- end -}}
{{- end -}}

{{/* Where traces go. Takes (root, settings); adds to a service's settings what these do not say themselves. */}}
{{- define "lockstep.tracing.settings" -}}
{{- with .root.Values.tracing -}}
{{- if .endpoint -}}
{{- $ours := dict "otlp_endpoint" .endpoint "trace_ratio" .ratio "trace_slow_s" .slowSeconds -}}
{{- if include "lockstep.tracing.hasCollector" $.root -}}
{{- $_ := set $ours "otlp_protocol" .protocol -}}
{{- end -}}
{{- range $name, $value := $ours -}}
{{- if not (hasKey $.settings $name) -}}
{{- $_ := set $.settings $name $value -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Seconds before its end at which a certificate is late: a week, or a half of the time that cert-manager has to renew it if that is less, or the
alert would fire for certificates that are renewed as they should be. One for clients that is made elsewhere is compared with the week besides.
Takes the root context; gives the end of the alert's expression.
*/}}
{{- define "lockstep.certificateIsLate" -}}
{{- $week := 604800 -}}
{{- $manager := .Values.tls.certManager -}}
{{- /* Without renewBefore it takes a third of the duration. */ -}}
{{- $renews := include "lockstep.seconds" $manager.renewBefore | int64 | default (div (include "lockstep.seconds" $manager.duration | int64) 3) -}}
{{- if and .Values.tls.enabled $manager.enabled $renews -}}
{{- $late := min $week (div $renews 2) -}}
{{- $late -}}
{{- if and (lt $late $week) (include "lockstep.tls.http" .) .Values.tls.http.secretName }}
or min by (namespace, release, pod, certificate) (
  lockstep_tls_certificate_expiry_timestamp_seconds{namespace="{{ .Release.Namespace }}",release="{{ .Release.Name }}",certificate="http"}) - time() < {{ $week }}
{{- end -}}
{{- else -}}
{{- $week -}}
{{- end -}}
{{- end -}}

{{/*
The groups of alerts and recording rules in rules/, as a file of Prometheus. $release and $namespace in these files stand for this
release's, and $runbooks for the runbooks' address; all other templates are for Prometheus.
*/}}
{{- define "lockstep.rules" -}}
groups:
  {{- range $path, $_ := .Files.Glob "rules/*.yaml" }}
  {{- $rules := $.Files.Get $path | replace ": $release" (printf ": %q" $.Release.Name) | replace ": $namespace" (printf ": %q" $.Release.Namespace) | replace "$release" $.Release.Name | replace "$namespace" $.Release.Namespace | replace "$runbooks" (trimSuffix "/" $.Values.monitoring.runbooks) | replace "7 * 86400" (include "lockstep.certificateIsLate" $ | indent 10 | trim) | fromYaml }}
  {{- toYaml $rules.groups | nindent 2 }}
  {{- end }}
{{- end -}}
