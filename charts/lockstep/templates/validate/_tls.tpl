{{/* Mistakes in the TLS settings: one message a line, or nothing. */}}
{{- define "lockstep.validate.tls" -}}
{{- with .Values.tls -}}
{{- if and .certManager.enabled (not .enabled) }}
tls.certManager.enabled needs tls.enabled
{{- end -}}
{{- if and .enabled .certManager.enabled -}}
{{- if not .certManager.issuerRef.name }}
tls.certManager.issuerRef.name is missing: cert-manager has to know who issues
{{- end -}}
{{- if not ($.Capabilities.APIVersions.Has "cert-manager.io/v1") }}
tls.certManager.enabled: the cluster has no cert-manager.io/v1; install cert-manager first (with `helm template`: --api-versions cert-manager.io/v1)
{{- end -}}
{{- end -}}
{{- if and .enabled .certManager.enabled -}}
{{- $services := list "router" "worker" -}}
{{- if $.Values.state.enabled -}}
{{- $services = append $services "state" -}}
{{- end -}}
{{- $taken := dict -}}
{{- range $service := $services -}}
{{- $secret := include (printf "lockstep.tls.%s.secret" $service) $ -}}
{{- if hasKey $taken $secret }}
tls.{{ $service }}.secretName: {{ $secret }} is the Secret of tls.{{ get $taken $secret }} too: cert-manager makes one for each service
{{- end -}}
{{- $_ := set $taken $secret $service -}}
{{- end -}}
{{- end -}}
{{- if and .http.clientCASecretName (not (and .enabled .http.enabled)) }}
tls.http.clientCASecretName is set, but routers have no HTTPS: they would admit clients without a certificate. Set tls.enabled and tls.http.enabled
{{- end -}}
{{- if contains "://" .worker.identity }}
tls.worker.identity: {{ .worker.identity }} is a URI, and routers can check DNS names only
{{- end -}}
{{- if contains "://" .state.identity }}
tls.state.identity: {{ .state.identity }} is a URI, and routers can check DNS names only
{{- end -}}
{{- end -}}
{{- end -}}
