{{- define "manta.labels" -}}
app.kubernetes.io/part-of: manta
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "manta.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{- define "manta.redisName" -}}
{{ .Release.Name }}-redis
{{- end }}

{{- define "manta.redisAddress" -}}
{{ if .Values.redis.tls.enabled }}rediss{{ else }}redis{{ end }}://{{ if .Values.redis.create }}{{ include "manta.redisName" . }}:6379{{ else }}{{ required "redis.address: where redis.create is false" .Values.redis.address }}{{ end }}
{{- end }}

{{/* Rules that the schema of the values cannot say. */}}
{{- define "manta.check" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$" .Release.Name) }}
{{- fail (printf "the release's name, %q: a letter, then letters, digits and dashes, at most 47 in all, as KubeRay wants it of a RayService" .Release.Name) }}
{{- end }}
{{- $groups := list }}
{{- range .Values.workers }}
{{- if has .name $groups }}
{{- fail (printf "workers: two groups have the name %s" .name) }}
{{- end }}
{{- $groups = append $groups .name }}
{{- end }}
{{- $names := concat (keys .Values.env) (list "MANTA_BLOCK_HASH_KEY_FILE" "MANTA_API_KEYS_FILE" "RAY_REDIS_CA_CERT" "RAY_REDIS_CLIENT_CERT" "RAY_REDIS_CLIENT_KEY") }}
{{- range .Values.extraEnv }}
{{- if has .name $names }}
{{- fail (printf "extraEnv: %s stands in env already, or is the chart's own" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- if and .Values.redis.enabled (not .Values.blockHashKey.existingSecret) }}
{{- fail "blockHashKey.existingSecret: required with redis.enabled, or the key would lie in Redis in clear" }}
{{- end }}
{{- if and (eq .Values.upgrade.type "NewClusterWithIncrementalUpgrade") (not .Values.autoscaler.enabled) }}
{{- fail "autoscaler.enabled: KubeRay upgrades incrementally only with the autoscaler" }}
{{- end }}
{{- if and (eq .Values.upgrade.type "NewClusterWithIncrementalUpgrade") (not .Values.upgrade.gatewayClassName) }}
{{- fail "upgrade.gatewayClassName: required for an incremental upgrade" }}
{{- end }}
{{- if gt (int .Values.upgrade.stepSizePercent) (int .Values.upgrade.maxSurgePercent) }}
{{- fail "upgrade.stepSizePercent: at most upgrade.maxSurgePercent" }}
{{- end }}
{{- if and (ne .Values.batchScheduler.type "none") (not .Values.batchScheduler.queue) }}
{{- fail "batchScheduler.queue: required with a batch scheduler" }}
{{- end }}
{{- if and (eq .Values.batchScheduler.type "kueue") .Values.autoscaler.enabled }}
{{- fail "autoscaler.enabled: Kueue admits a cluster of a fixed size; turn one of the two off" }}
{{- end }}
{{- if lt (int .Values.upgrade.deletionDelaySeconds) (int .Values.drain.deadlineSeconds) }}
{{- fail "upgrade.deletionDelaySeconds: at least drain.deadlineSeconds, or an upgrade cuts streams that a drain waits for" }}
{{- end }}
{{- range .Values.workers }}
{{- if or (gt (int .minReplicas) (int .replicas)) (gt (int .replicas) (int .maxReplicas)) }}
{{- fail (printf "workers: %s: minReplicas <= replicas <= maxReplicas does not hold" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Labels by which a batch scheduler takes the pods of a cluster together. */}}
{{- define "manta.batchLabels" -}}
{{- if eq .Values.batchScheduler.type "kueue" }}
kueue.x-k8s.io/queue-name: {{ .Values.batchScheduler.queue | quote }}
{{- else if eq .Values.batchScheduler.type "volcano" }}
volcano.sh/queue-name: {{ .Values.batchScheduler.queue | quote }}
{{- end }}
{{- end }}

{{- define "manta.env" -}}
{{- range $name, $value := .Values.env }}
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
{{- if .Values.blockHashKey.existingSecret }}
- name: MANTA_BLOCK_HASH_KEY_FILE
  value: /etc/manta/block-hash/key
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
- name: MANTA_API_KEYS_FILE
  value: /etc/manta/api-keys/keys
{{- end }}
{{- if and .Values.redis.enabled .Values.redis.tls.enabled }}
- name: RAY_REDIS_CA_CERT
  value: /etc/manta/redis-tls/ca.crt
- name: RAY_REDIS_CLIENT_CERT
  value: /etc/manta/redis-tls/tls.crt
- name: RAY_REDIS_CLIENT_KEY
  value: /etc/manta/redis-tls/tls.key
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "manta.volumeMounts" -}}
- name: shm
  mountPath: /dev/shm
{{- if ne .Values.models.source "none" }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .Values.blockHashKey.existingSecret }}
- name: block-hash-key
  mountPath: /etc/manta/block-hash
  readOnly: true
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
- name: api-keys
  mountPath: /etc/manta/api-keys
  readOnly: true
{{- end }}
{{- if and .Values.redis.enabled .Values.redis.tls.enabled }}
- name: redis-tls
  mountPath: /etc/manta/redis-tls
  readOnly: true
{{- end }}
{{- end }}

{{/* Volumes of a pod; takes a dict of root and shmSize. */}}
{{- define "manta.volumes" -}}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .shmSize | quote }}
{{- with .root.Values }}
{{- if eq .models.source "persistentVolumeClaim" }}
- name: models
  persistentVolumeClaim:
    claimName: {{ required "models.claimName: the claim that holds the models" .models.claimName | quote }}
    readOnly: true
{{- else if eq .models.source "hostPath" }}
- name: models
  hostPath:
    path: {{ required "models.hostPath: the directory that holds the models" .models.hostPath | quote }}
    type: Directory
{{- end }}
{{- if .blockHashKey.existingSecret }}
- name: block-hash-key
  secret:
    secretName: {{ .blockHashKey.existingSecret | quote }}
{{- end }}
{{- if .apiKeys.existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .apiKeys.existingSecret | quote }}
{{- end }}
{{- if and .redis.enabled .redis.tls.enabled }}
- name: redis-tls
  secret:
    secretName: {{ .redis.tls.existingSecret | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "manta.podSecurity" -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
fsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "manta.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}
