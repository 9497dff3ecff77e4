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
