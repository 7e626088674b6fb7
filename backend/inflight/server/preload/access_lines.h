/* Access lines of requests that tritonserver refuses before a model gets them, in the format of inflight/access_log.py.
 *
 * A thread of a front end makes a request, and either gives it to the server or deletes it. What is deleted was refused.
 * Requests that a model gets have their lines from inflight. There is no line with INFLIGHT_ACCESS_LOG=0.
 */
enum { MAX_FIELD = 160 };
static const char* const CODES[] = {"UNKNOWN",     "INTERNAL",    "NOT_FOUND",      "INVALID_ARG",
                                    "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"};

typedef struct {
  char model[256], id[256];
  unsigned code; /* of the last error on this thread */
  struct timespec begun;
  bool is_open; /* neither given to the server nor refused yet */
} Arrival;

static _Thread_local Arrival arrival;

static void begin_arrival(const char* model) {
  snprintf(arrival.model, sizeof arrival.model, "%s", model);
  arrival.id[0] = '\0';
  arrival.code = INVALID_ARG;
  arrival.is_open = true;
  clock_gettime(CLOCK_MONOTONIC, &arrival.begun);
}

/* Writes a client's text as the value of a field. Quotes keep numbers texts; "?" is in place of what needs an escape. */
static void write_value(char* value, const char* text) {
  size_t used = 0;
  bool is_quoted = (*text >= '0' && *text <= '9') || *text == '-';
  if (is_quoted) value[used++] = '"';
  for (; *text != '\0' && used < MAX_FIELD - 2; text++) {
    bool is_plain = *text > ' ' && *text <= '~' && *text != '"' && *text != '=' && *text != '\\';
    value[used++] = is_plain ? *text : '?';
  }
  if (is_quoted) value[used++] = '"';
  value[used] = '\0';
}

/* Writes the line of the request of this thread, which has been refused. */
static void end_arrival(void) {
  static atomic_uint_fast64_t num_lines;
  const char* wanted = getenv("INFLIGHT_ACCESS_LOG");
  if (!arrival.is_open) return;
  arrival.is_open = false;
  if (wanted != NULL && strcmp(wanted, "0") == 0) return;
  struct timespec now, end;
  struct tm utc;
  clock_gettime(CLOCK_REALTIME, &now);
  clock_gettime(CLOCK_MONOTONIC, &end);
  gmtime_r(&now.tv_sec, &utc);
  double took_ms = (end.tv_sec - arrival.begun.tv_sec) * 1e3 + (end.tv_nsec - arrival.begun.tv_nsec) / 1e6;
  if (arrival.id[0] == '\0') {
    snprintf(arrival.id, sizeof arrival.id, "refused-%d-%llu", (int)getpid(),
             (unsigned long long)atomic_fetch_add(&num_lines, 1) + 1);
  }
  char model[MAX_FIELD], id[MAX_FIELD], line[1024];
  write_value(model, arrival.model[0] == '\0' ? "?" : arrival.model);
  write_value(id, arrival.id);
  int size = snprintf(line, sizeof line,
                      "I%02d%02d %02d:%02d:%02d.%06ld %d access] request_id=%s front=triton model=%s prompt_tokens=0 "
                      "output_tokens=0 finish_reason=ERROR code=%s total_ms=%.1f\n",
                      utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, now.tv_nsec / 1000,
                      (int)getpid(), id, model, CODES[arrival.code < 8 ? arrival.code : 0], took_ms);
  if (write(STDERR_FILENO, line, size) < 0) return; /* nobody reads the log */
}
