{{/* Certificates: where they are, and who they are for. All take the root context. */}}

{{- define "lockstep.tls.router.secret" -}}
{{- .Values.tls.router.secretName | default (printf "%s-tls" (include "lockstep.router.name" .)) -}}
{{- end -}}

{{- define "lockstep.tls.worker.secret" -}}
{{- .Values.tls.worker.secretName | default (printf "%s-tls" (include "lockstep.worker.name" .)) -}}
{{- end -}}

{{- define "lockstep.tls.state.secret" -}}
{{- .Values.tls.state.secretName | default (printf "%s-tls" (include "lockstep.state.name" .)) -}}
{{- end -}}

{{/* What a router's certificate is for, as workers check it: a DNS name or a URI. */}}
{{- define "lockstep.tls.router.identity" -}}
{{- .Values.tls.router.identity | default (printf "%s.%s.svc" (include "lockstep.router.name" .) .Release.Namespace) -}}
{{- end -}}

{{/* What a worker's certificate is for, as routers check it: a DNS name. */}}
{{- define "lockstep.tls.worker.identity" -}}
{{- .Values.tls.worker.identity | default (printf "%s.%s.svc" (include "lockstep.workers.name" .) .Release.Namespace) -}}
{{- end -}}

{{/* What the state server's certificate is for, as routers check it: a DNS name. */}}
{{- define "lockstep.tls.state.identity" -}}
{{- .Values.tls.state.identity | default (printf "%s.%s.svc" (include "lockstep.state.name" .) .Release.Namespace) -}}
{{- end -}}

{{/* Whether clients speak HTTPS to routers; whether kubelets and Prometheus do to all. Empty or not. */}}
{{- define "lockstep.tls.http" -}}
{{- and .Values.tls.enabled .Values.tls.http.enabled | ternary "true" "" -}}
{{- end -}}

{{- define "lockstep.tls.management" -}}
{{- and .Values.tls.enabled .Values.tls.management | ternary "true" "" -}}
{{- end -}}

{{/* The settings that all services have. Takes (root, settings, peer); changes the settings. */}}
{{- define "lockstep.tls.settings" -}}
{{- if .root.Values.tls.enabled -}}
{{- $_ := set .settings "tls_cert" "/etc/lockstep-tls/tls.crt" -}}
{{- $_ := set .settings "tls_key" "/etc/lockstep-tls/tls.key" -}}
{{- $_ := set .settings "tls_ca" "/etc/lockstep-tls/ca.crt" -}}
{{- $_ := set .settings "peer_identity" (include (printf "lockstep.tls.%s.identity" .peer) .root) -}}
{{- if .root.Values.tls.management -}}
{{- $_ := set .settings "management_tls" true -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* How a probe asks the management port. Takes (root, path). */}}
{{- define "lockstep.probe" -}}
httpGet: {path: {{ .path }}, port: management{{ if include "lockstep.tls.management" .root }}, scheme: HTTPS{{ end }}}
{{- end -}}

{{/* How Prometheus does. Takes (root, secret, name): the Secret of the service, the name in its certificate. */}}
{{- define "lockstep.scrape" -}}
{{- if include "lockstep.tls.management" .root -}}
scheme: https
tlsConfig:
  ca: {secret: {name: {{ .secret }}, key: ca.crt}}
  cert: {secret: {name: {{ .secret }}, key: tls.crt}}
  keySecret: {name: {{ .secret }}, key: tls.key}
  serverName: {{ .name }}
{{- end -}}
{{- end -}}
