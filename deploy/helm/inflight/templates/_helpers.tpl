{{- define "inflight.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "inflight.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "inflight.labels" -}}
{{ include "inflight.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Labels of the pods that answer requests: all of a Deployment, and the leaders of a LeaderWorkerSet. */}}
{{- define "inflight.serverSelector" -}}
{{ include "inflight.selector" . }}
app.kubernetes.io/component: server
{{- end }}

{{- define "inflight.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Fails for values that contradict each other, which the schema cannot express. */}}
{{- define "inflight.check" -}}
{{- with .Values }}
{{- if and .model.id .model.path }}{{ fail "model.id and model.path name two checkpoints: set one" }}{{ end }}
{{- if and (or .model.id .model.path) (eq .volume.kind "none") }}{{ fail "a checkpoint needs a volume: set volume.kind to shared, existing or perPod" }}{{ end }}
{{- if and .model.path (ne .volume.kind "existing") }}{{ fail "model.path is a folder in a volume of yours: set volume.kind to existing" }}{{ end }}
{{- if and .model.id .volume.readOnly }}{{ fail "model.id is downloaded into the volume: volume.readOnly is for model.path" }}{{ end }}
{{- if and (eq .volume.kind "existing") (not .volume.claim) }}{{ fail "volume.kind existing needs volume.claim" }}{{ end }}
{{- if and (gt (int .multiNode.nodes) 1) (not .multiNode.sshSecret) }}{{ fail "multiNode needs multiNode.sshSecret" }}{{ end }}
{{- if and (gt (int .multiNode.nodes) 1) (eq .volume.kind "none") }}{{ fail "multiNode needs a checkpoint that every node can read" }}{{ end }}
{{- if and (eq .autoscaling.kind "keda") (not .autoscaling.prometheus) }}{{ fail "autoscaling.kind keda needs autoscaling.prometheus" }}{{ end }}
{{- if and .gateway.enabled (not .gateway.parents) }}{{ fail "gateway needs gateway.parents" }}{{ end }}
{{- if and (eq (toString .rollout.maxSurge) "0") (eq (toString .rollout.maxUnavailable) "0") }}{{ fail "rollout: maxSurge and maxUnavailable cannot both be 0" }}{{ end }}
{{- end }}
{{- end }}

{{- define "inflight.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Environment for the folders that are written to. */}}
{{- define "inflight.folders" -}}
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /var/cache/inflight}
- {name: HF_HOME, value: /models/huggingface}
{{- end }}

{{- define "inflight.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/inflight}
{{- if ne .Values.volume.kind "none" }}
- {name: models, mountPath: /models{{ if .Values.volume.readOnly }}, readOnly: true{{ end }}}
{{- end }}
{{- end }}

{{- define "inflight.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.cacheSize }}}
# Responses are passed through /dev/shm, of which a pod has 64 MB by default.
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .Values.sharedMemory }}}
{{- with .Values.volume }}
{{- if or (eq .kind "shared") (eq .kind "existing") }}
- name: models
  persistentVolumeClaim: {claimName: {{ .claim | default (printf "%s-models" (include "inflight.name" $)) }}{{ if .readOnly }}, readOnly: true{{ end }}}
{{- else if eq .kind "perPod" }}
- name: models
  ephemeral:
    volumeClaimTemplate:
      spec: {{- include "inflight.claim" (dict "mode" "ReadWriteOnce" "volume" .) | nindent 8 }}
{{- end }}
{{- end }}
{{- if gt (int .Values.multiNode.nodes) 1 }}
- name: ssh
  projected:
    defaultMode: 0440
    sources:
      - secret: {name: {{ .Values.multiNode.sshSecret }}}
      - configMap: {name: {{ include "inflight.name" . }}-ssh}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "inflight.claim" -}}
accessModes: [{{ .mode }}]
{{- with .volume.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .volume.size }}}}
{{- end }}

{{/* The flags of scripts/serve, one a line. */}}
{{- define "inflight.flags" -}}
{{- $v := .Values }}
{{- if $v.model.id }}
- --model
- {{ $v.model.id | quote }}
{{- with $v.model.revision }}
- --revision
- {{ . | quote }}
{{- end }}
{{- else if $v.model.path }}
- --model
- {{ printf "/models/%s" (trimPrefix "/" $v.model.path) | quote }}
{{- end }}
{{- with $v.model.servedNames }}
- --served-model-name
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- range $key, $value := $v.settings }}
- --set
- {{ printf "%s=%v" $key $value | quote }}
{{- end }}
# Kubernetes restarts a server that has ended.
- --restarts
- "0"
- --exit-timeout
- {{ $v.exitTimeout | quote }}
{{- $nodes := int $v.multiNode.nodes }}
{{- if gt $nodes 1 }}
- --tp
- {{ max 1 (int $v.gpus) | quote }}
- --pp
- {{ $nodes | quote }}
- --mode
- orchestrator
- --mpirun-arguments
- {{ include "inflight.mpirun" . | quote }}
{{- else if gt (int $v.gpus) 1 }}
- --tp
- {{ $v.gpus | quote }}
{{- end }}
{{- range $v.flags }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* A host for each pod of the group: the leader by its own name, workers by their names in the headless service. */}}
{{- define "inflight.mpirun" -}}
{{- $slots := max 1 (int .Values.gpus) -}}
--host $(POD_NAME):{{ $slots }}{{ range $i := untilStep 1 (int .Values.multiNode.nodes) 1 }},$(POD_NAME)-{{ $i }}.{{ include "inflight.name" $ }}:{{ $slots }}{{ end }} --prtemca plm_ssh_agent 'ssh -F /etc/inflight/ssh/ssh_config'
{{- end }}

{{- define "inflight.pod" -}}
serviceAccountName: {{ include "inflight.name" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .Values.tolerations .Values.gpus }}
tolerations:
{{- if .Values.gpus }}
  - {key: {{ .Values.gpuResource }}, operator: Exists, effect: NoSchedule}
{{- end }}
{{- with .Values.tolerations }}
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if and .Values.topologySpread.enabled (eq (int .Values.multiNode.nodes) 1) }}
topologySpreadConstraints:
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: {{ $.Values.topologySpread.maxSkew }}
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "inflight.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
volumes: {{- include "inflight.volumes" . | nindent 2 }}
{{- end }}

{{- define "inflight.resources" -}}
{{- $resources := deepCopy .Values.resources }}
{{- if .Values.gpus }}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .Values.gpuResource (int .Values.gpus))) }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Downloads the checkpoint, if the volume does not have it yet. */}}
{{- define "inflight.fetch" -}}
- name: fetch
  image: {{ include "inflight.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python3, -m, inflight.hub]
  args:
    - {{ .Values.model.id | quote }}
{{- with .Values.model.revision }}
    - --revision
    - {{ . | quote }}
{{- end }}
  env: {{- include "inflight.folders" . | nindent 4 }}
{{- with .Values.model.tokenSecret }}
{{- if .name }}
    - name: HF_TOKEN
      valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
  securityContext: {{- include "inflight.securityContext" . | nindent 4 }}
  resources:
    requests: {cpu: 500m, memory: 1Gi}
    limits: {memory: 2Gi}
  volumeMounts: {{- include "inflight.mounts" . | nindent 4 }}
{{- end }}

{{- define "inflight.server" -}}
- name: inflight
  image: {{ include "inflight.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: {{- include "inflight.flags" . | trim | nindent 4 }}
  ports:
    - {name: openai, containerPort: 9000}
    - {name: http, containerPort: 8000}
    - {name: grpc, containerPort: 8001}
    - {name: metrics, containerPort: 8002}
  env: {{- include "inflight.folders" . | nindent 4 }}
{{- if .Values.model.id }}
    - {name: HF_HUB_OFFLINE, value: "1"} # the init container has downloaded the checkpoint
{{- end }}
{{- with .Values.apiKeySecret }}
{{- if .name }}
    - name: INFLIGHT_API_KEY
      valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- if gt (int .Values.multiNode.nodes) 1 }}
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
{{- with .Values.env }}
{{- toYaml . | nindent 4 }}
{{- end }}
{{- $scheme := has "--ssl-certfile" .Values.flags | ternary "HTTPS" "HTTP" }}
  # /health of /v1 answers 200 only while both /v1 and the engine behind it work.
  startupProbe:
    httpGet: {path: /health, port: openai, scheme: {{ $scheme }}}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: {{ div (add (int .Values.startupSeconds) 4) 5 }}
  readinessProbe:
    httpGet: {path: /health, port: openai, scheme: {{ $scheme }}}
    periodSeconds: 5
    timeoutSeconds: 5
    failureThreshold: 2
  livenessProbe:
    httpGet: {path: /health, port: openai, scheme: {{ $scheme }}}
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: {{ div (add (int .Values.awaySeconds) 9) 10 }}
  # The Service drops the pod before the server is told to end, so that no request meets a closed port.
  lifecycle:
    preStop:
      exec: {command: [sleep, "10"]}
  securityContext: {{- include "inflight.securityContext" . | nindent 4 }}
  resources: {{- include "inflight.resources" . | nindent 4 }}
  volumeMounts: {{- include "inflight.mounts" . | nindent 4 }}
    - {name: shm, mountPath: /dev/shm}
{{- if gt (int .Values.multiNode.nodes) 1 }}
    - {name: ssh, mountPath: /etc/inflight/ssh, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{- define "inflight.podMetadata" -}}
{{- if .root.Values.podAnnotations }}
annotations: {{- toYaml .root.Values.podAnnotations | nindent 2 }}
{{- end }}
labels:
  {{- include "inflight.selector" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
{{- with .root.Values.podLabels }}
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Whether the PodMonitor reads the metrics of /v1: it cannot if they need an API key and it has none. */}}
{{- define "inflight.monitorsOpenai" -}}
{{- $monitoring := .Values.monitoring }}
{{- if and $monitoring.podMonitor (or (not .Values.apiKeySecret.name) $monitoring.apiKeySecret.name) }}true{{ end }}
{{- end }}
