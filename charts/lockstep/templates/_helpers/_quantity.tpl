{{/* Arithmetic with Kubernetes quantities and with durations. */}}

{{/* Bytes of a quantity: 1Gi, 1.5G, 512Mi, 1e9, 1073741824. Of what is none, nothing. */}}
{{- define "lockstep.bytes" -}}
{{- $text := toString . -}}
{{- $number := regexFind "^[0-9.]+([eE][0-9+-]+)?" $text -}}
{{- $unit := trimPrefix $number $text -}}
{{- $units := dict "" 1 "k" 1000 "K" 1000 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- if and $number (hasKey $units $unit) -}}
{{- mulf (float64 $number) (get $units $unit) | ceil | int64 -}}
{{- end -}}
{{- end -}}

{{/* A number of bytes, in the largest binary unit that keeps it whole. */}}
{{- define "lockstep.quantity" -}}
{{- $bytes := int64 . -}}
{{- if eq (mod $bytes 1073741824) 0 -}}{{ div $bytes 1073741824 }}Gi
{{- else if eq (mod $bytes 1048576) 0 -}}{{ div $bytes 1048576 }}Mi
{{- else if eq (mod $bytes 1024) 0 -}}{{ div $bytes 1024 }}Ki
{{- else -}}{{ $bytes }}
{{- end -}}
{{- end -}}

{{/* Seconds of a duration: 720h, 1h30m, 90s. Of an empty one 0. */}}
{{- define "lockstep.seconds" -}}
{{- $text := toString . -}}
{{- $sum := 0 -}}
{{- range $unit, $seconds := dict "h" 3600 "m" 60 "s" 1 -}}
{{- $sum = add $sum (mul $seconds (regexFind (printf "[0-9]+%s" $unit) $text | trimSuffix $unit | int64)) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}
