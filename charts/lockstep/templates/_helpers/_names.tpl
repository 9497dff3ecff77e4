{{/* Names: one function a thing, so that no template spells one. All take the root context unless they say otherwise. */}}

{{- define "lockstep.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "lockstep.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lockstep.router.name" -}}
{{- printf "%s-router" (include "lockstep.fullname" .) -}}
{{- end -}}

{{/* The headless Service of all routers. */}}
{{- define "lockstep.routers.name" -}}
{{- printf "%s-routers" (include "lockstep.fullname" .) -}}
{{- end -}}

{{/* The ServiceAccount and Role of all workers. */}}
{{- define "lockstep.worker.name" -}}
{{- printf "%s-worker" (include "lockstep.fullname" .) -}}
{{- end -}}

{{/* The headless Service of all workers. */}}
{{- define "lockstep.workers.name" -}}
{{- printf "%s-workers" (include "lockstep.fullname" .) -}}
{{- end -}}

{{/* What belongs to one model. Takes (root, model). */}}
{{- define "lockstep.model.name" -}}
{{- printf "%s-%s" (include "lockstep.worker.name" .root) .model.name -}}
{{- end -}}

{{- define "lockstep.router.serviceAccountName" -}}
{{- $account := .Values.router.serviceAccount -}}
{{- default (ternary (include "lockstep.router.name" .) "default" $account.create) $account.name -}}
{{- end -}}

{{- define "lockstep.worker.serviceAccountName" -}}
{{- $account := .Values.worker.serviceAccount -}}
{{- default (ternary (include "lockstep.worker.name" .) "default" $account.create) $account.name -}}
{{- end -}}

{{/* The state server. */}}
{{- define "lockstep.state.name" -}}
{{- printf "%s-state" (include "lockstep.fullname" .) -}}
{{- end -}}

{{/* The bundled Redis. */}}
{{- define "lockstep.redis.name" -}}
{{- printf "%s-redis" (include "lockstep.fullname" .) -}}
{{- end -}}

{{- define "lockstep.state.serviceAccountName" -}}
{{- $account := .Values.state.serviceAccount -}}
{{- default (ternary (include "lockstep.state.name" .) "default" $account.create) $account.name -}}
{{- end -}}
