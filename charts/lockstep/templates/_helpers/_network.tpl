{{/* Rules of NetworkPolicies that several services need. All take the root context. */}}

{{/* The API server is not a pod, and its addresses are the cluster's business: it can be told by its ports alone. */}}
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
