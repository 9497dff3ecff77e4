{{/* Rules of NetworkPolicies that several services need. All take the root context. */}}

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

{{/* Routers and workers reach the state server. */}}
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
