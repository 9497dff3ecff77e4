{{/* What every pod of the release has in common. */}}

{{/*
`replicas:` of a Deployment or StatefulSet, with an autoscaler those that it has now: without the field an upgrade that switches
autoscaling on would leave one pod. Nothing where it does not exist, or where no cluster can be asked. Takes (root, kind, name, options).
*/}}
{{- define "lockstep.replicas" -}}
{{- if not .options.autoscaling.enabled -}}
replicas: {{ .options.replicas }}
{{- else -}}
{{- with lookup "apps/v1" .kind .root.Release.Namespace .name -}}
replicas: {{ .spec.replicas }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A Deployment's strategy, of the values `updateStrategy`: with Recreate the API server refuses the default `rollingUpdate`. */}}
{{- define "lockstep.strategy" -}}
{{- eq .type "Recreate" | ternary (omit . "rollingUpdate") . | toYaml -}}
{{- end -}}

{{/*
The head of a pod's spec. Takes
  root, component, model?      as the labels do
  options                      the values of the service or of the model
  serviceAccountName           who it is to the API server; containers that go there mount "lockstep.tokenMount"
  tolerations?                 those that go before the given ones
  revisionLabel?               what a Deployment tells its revisions apart by
*/}}
{{- define "lockstep.podSpec" -}}
{{- $options := .options -}}
serviceAccountName: {{ .serviceAccountName | quote }}
automountServiceAccountToken: false
# Environment variables of all Services of the namespace: slow with many, and one named like us would set our settings.
enableServiceLinks: false
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $options.podSecurityContext | nindent 2 }}
{{- with $options.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $options.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $options.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat (.tolerations | default list) ($options.tolerations | default list) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $options.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "lockstep.topologySpread" . | trim }}
topologySpreadConstraints:
  {{- . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "lockstep.topologySpread" -}}
{{- $here := . -}}
{{- range $key, $name := dict "zone" "topology.kubernetes.io/zone" "hostname" "kubernetes.io/hostname" }}
{{- with get $here.options.topologySpread $key }}
- topologyKey: {{ $name }}
  maxSkew: 1
  whenUnsatisfiable: {{ . }}
  labelSelector:
    matchLabels:
      {{- include "lockstep.selectorLabels" $here | nindent 6 }}
  {{- with $here.revisionLabel }}
  {{- /* Or pods of the revision that a rollout replaces would count, and the new ones end up in one place. */}}
  matchLabelKeys: [{{ . }}]
  {{- end }}
{{- end }}
{{- end }}
{{- with $here.options.topologySpreadConstraints }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
The pod's token for the API server: of an hour, renewed by the kubelet, and mounted only in the container that uses it. Clients look
for it in this directory.
*/}}
{{- define "lockstep.tokenMount" -}}
- {name: api-token, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end -}}

{{- define "lockstep.tokenVolume" -}}
- name: api-token
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end -}}

{{/* Who this pod is, for its logs, events and sessions. */}}
{{- define "lockstep.podEnv" -}}
- name: LOCKSTEP_CONFIG
  value: /etc/lockstep/config.yaml
- name: LOCKSTEP_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: LOCKSTEP_POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: LOCKSTEP_POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: LOCKSTEP_NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- end -}}

{{/*
The end of a pod, in seconds:

  preStop sleep   the pod is Terminating and unaware; endpoints, kube-proxies and load balancers forget it
  + lame duck     it says "not ready" and closes idle connections, and still serves (routers)
  + drain         running streams end by themselves; what is left is handed over
  + 15            the end itself: last frames, ranks and sockets
  = grace period

Takes (options): the values of the router or of a model.
*/}}
{{- define "lockstep.leastGrace" -}}
{{- $settings := .options.settings -}}
{{- addf .options.preStopSleepSeconds ($settings.lame_duck_s | default 0) ($settings.drain_timeout_s | default 0) 15 | ceil | int64 -}}
{{- end -}}

{{- define "lockstep.graceInWords" -}}
{{- $settings := .options.settings -}}
preStop sleep {{ .options.preStopSleepSeconds }}
{{- with $settings.lame_duck_s }} + lame duck {{ . }}{{ end }} + drain {{ $settings.drain_timeout_s | default 0 }} + 15 = {{ include "lockstep.leastGrace" . }} s
{{- end -}}

{{- define "lockstep.gracePeriod" -}}
{{- if kindIs "invalid" .options.terminationGracePeriodSeconds -}}
{{- include "lockstep.leastGrace" . -}}
{{- else -}}
{{- int64 .options.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.preStop" -}}
{{- if gt (int .options.preStopSleepSeconds) 0 -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ int .options.preStopSleepSeconds }}
{{- end }}
{{- end -}}

{{/* A PodDisruptionBudget's spec without its selector, of the values `podDisruptionBudget`. */}}
{{- define "lockstep.disruption" -}}
{{- if kindIs "invalid" .minAvailable -}}
maxUnavailable: {{ .maxUnavailable }}
{{- else -}}
minAvailable: {{ .minAvailable }}
{{- end }}
# A pod that is not ready protects nothing: it must not hold up a drain.
unhealthyPodEvictionPolicy: AlwaysAllow
{{- end -}}
