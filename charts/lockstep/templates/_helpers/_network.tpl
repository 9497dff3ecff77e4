{{/* Where services listen, and rules of NetworkPolicies that several services need. All but `lockstep.listen` take the root context. */}}

{{/* A release of an older version that is upgraded with its own values has none. */}}
{{- define "lockstep.listenAddress" -}}
{{- .Values.listenAddress | default "0.0.0.0" -}}
{{- end -}}

{{/* Where gRPC listens, an IPv6 address in brackets. Takes (root, port). */}}
{{- define "lockstep.listen" -}}
{{- $address := include "lockstep.listenAddress" .root -}}
{{- printf (contains ":" $address | ternary "[%s]:%d" "%s:%d") $address (int .port) -}}
{{- end -}}

{{/* The API server is not a pod: it is described by the addresses and ports of networkPolicy.apiServer. */}}
{{- define "lockstep.egressToApiServer" -}}
- ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - {port: {{ . }}}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* Routers reach the state server, and workers that keep blocks there. */}}
{{- define "lockstep.egressToState" -}}
- ports: [{port: 9100}]
  to:
    - podSelector:
        matchLabels:
          {{- include "lockstep.selectorLabels" (dict "root" . "component" "kv-state-server") | nindent 10 }}
{{- end -}}

{{/* Routers, workers and the state server send traces to the collector. */}}
{{- define "lockstep.egressToCollector" -}}
- ports:
    {{- range .Values.tracing.collector.ports }}
    - {port: {{ . }}}
    {{- end }}
  {{- with .Values.tracing.collector.to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
