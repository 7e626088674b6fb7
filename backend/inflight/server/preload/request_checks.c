/* A library preloaded into tritonserver: it refuses requests that would crash tritonserver, and records the last requests.
 *
 * tritonserver's HTTP and gRPC front ends make every request with libtritonserver's C API. The functions here have
 * the names of API functions, so that the loader finds them first. Each function checks its arguments, and either calls
 * the real function or returns an error, which the front end sends to the client. Processes other than tritonserver are
 * not changed. Needs a C compiler and the C library.
 *
 * These requests crash tritonserver 2.51 or its Python backend, and are refused: an empty batch (SIGSEGV), a shape whose
 * number of bytes overflows or exceeds any message (SIGSEGV, abort or std::bad_alloc), and classification of a text
 * output (SIGFPE). A connection with JSON that is nested too deeply for a thread's stack (SIGSEGV) is closed, because
 * the parser cannot be stopped. A compressed body may decompress to the size limit of an uncompressed one. The name of
 * a shared-memory region is removed from errors.
 *
 * Some of Triton's own errors get the status of a client's mistake, or a hint (docs/triton.md). Requests that are refused
 * here or by Triton itself get a line in the access log (access_lines.h).
 *
 * Models are notified before the metrics page is read, so that it includes all requests answered before
 * (triton/metrics_on_demand.py).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* The part of tritonserver.h that is used here; it is not installed with tritonserver. The C API's numbers are stable. */
typedef struct Opaque Error, Request, Response, Server;
enum { INTERNAL = 1, INVALID_ARG = 3, BATCH_FIRST_DIM = 2, BYTES = 13, NUM_TYPES = 15 };
static const uint64_t BYTES_OF[NUM_TYPES] = {1, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 4, 2}; /* 4 for a text's length */

/* Largest size in bytes of a tensor. For gRPC it is the limit of a message. For HTTP it is the largest tensor in a JSON body
 * of at most 64 MiB, with two characters for an element of at most 8 bytes; the front end allocates this size before it
 * reads the data. */
static const uint64_t MAX_BYTES = INT32_MAX, MAX_HTTP_BYTES = 256 << 20;
/* Largest sizes in bytes of a decompressed HTTP body and of a decompressed gRPC message. */
static const uint64_t MAX_HTTP_UNPACKED = 64 << 20, MAX_UNPACKED = 256 << 20;
enum { MAX_NESTED = 500000, STACK_OF_A_LEVEL = 256 }; /* the parser uses about 100 bytes of stack per level */

/* The file of the last requests has slots of text, each of which begins with the request's number. */
enum { NUM_SLOTS = 64, SLOT_BYTES = 1024 };

#include "access_lines.h"

typedef struct {
  const Request* request; /* the request that this thread makes */
  Server* server;
  char model[256];
  int64_t version;
  char* slot;      /* NULL if requests are not recorded */
  char input[128]; /* the last one that was added; "" if none was */
  int data_type;   /* of this input */
  size_t used;
} Making;

static _Thread_local Making making;
static _Thread_local bool output_is_text; /* of the last output that this thread read */
static _Thread_local bool is_http;        /* this thread reads HTTP connections and makes their requests */
static _Thread_local bool is_generate;    /* this thread's last HTTP request is one of generate */
static _Thread_local bool is_post;        /* the last request that this thread read is a POST request */
static char* slots;
static int most_nested = MAX_NESTED;
static atomic_uint_fast64_t num_requests;

static Error* (*real_request_new)(Request**, Server*, const char*, int64_t);
static Error* (*real_set_id)(Request*, const char*);
static Error* (*real_add_input)(Request*, const char*, int, const int64_t*, uint64_t);
static Error* (*real_response_output)(Response*, uint32_t, const char**, int*, const int64_t**, uint64_t*,
                                      const void**, size_t*, int*, int64_t*, void**);
static uint32_t (*real_data_type_byte_size)(int);
static Error* (*real_infer_async)(Server*, Request*, void*);
static Error* (*real_request_delete)(Request*);
static Error* (*real_transaction_properties)(Server*, const char*, int64_t, uint32_t*, void**);
static Error* (*real_model_metadata)(Server*, const char*, int64_t, void**);
static int (*error_code)(Error*);
static Error* (*real_server_metrics)(Server*, void**);
static Error* (*batch_properties)(Server*, const char*, int64_t, uint32_t*, void**);
static Error* (*error_new)(int, const char*);
static void (*error_delete)(Error*);
static const char* (*real_error_message)(Error*);
static ssize_t (*real_readv)(int, const struct iovec*, int);
static ssize_t (*real_writev)(int, const struct iovec*, int);
static int (*real_accept)(int, struct sockaddr*, socklen_t*);
static int (*real_accept4)(int, struct sockaddr*, socklen_t*, int);

static void map_slots(void) {
  const char* folder = getenv("XDG_RUNTIME_DIR");
  char path[4096];
  if (folder == NULL || snprintf(path, sizeof path, "%s/last_requests", folder) >= (int)sizeof path) return;
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (ftruncate(file, NUM_SLOTS * SLOT_BYTES) == 0) {
    void* mapped = mmap(NULL, NUM_SLOTS * SLOT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) slots = mapped;
  }
  close(file);
}

/* Removes this library from LD_PRELOAD, so that processes that tritonserver starts do not load it. */
static void leave_environment(void) {
  const char* given = getenv("LD_PRELOAD");
  Dl_info self;
  if (given == NULL || !dladdr((void*)leave_environment, &self)) return;
  char* left = calloc(1, strlen(given) + 1);
  char* copy = strdup(given);
  if (left != NULL && copy != NULL) {
    char* rest = NULL;
    for (char* each = strtok_r(copy, ": ", &rest); each != NULL; each = strtok_r(NULL, ": ", &rest)) {
      if (strcmp(each, self.dli_fname) == 0) continue;
      if (*left != '\0') strcat(left, ":");
      strcat(left, each);
    }
    if (*left != '\0') setenv("LD_PRELOAD", left, 1);
    else unsetenv("LD_PRELOAD");
  }
  free(copy);
  free(left);
}

__attribute__((constructor)) static void begin(void) {
  real_readv = dlsym(RTLD_NEXT, "readv");
  real_writev = dlsym(RTLD_NEXT, "writev");
  real_accept = dlsym(RTLD_NEXT, "accept");
  real_accept4 = dlsym(RTLD_NEXT, "accept4");
  real_request_new = dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestNew");
  if (real_request_new == NULL) return; /* not tritonserver, but a program that starts it */
  real_set_id = dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestSetId");
  real_add_input = dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestAddInput");
  real_response_output = dlsym(RTLD_NEXT, "TRITONSERVER_InferenceResponseOutput");
  real_infer_async = dlsym(RTLD_NEXT, "TRITONSERVER_ServerInferAsync");
  real_request_delete = dlsym(RTLD_NEXT, "TRITONSERVER_InferenceRequestDelete");
  real_transaction_properties = dlsym(RTLD_NEXT, "TRITONSERVER_ServerModelTransactionProperties");
  real_model_metadata = dlsym(RTLD_NEXT, "TRITONSERVER_ServerModelMetadata");
  error_code = dlsym(RTLD_NEXT, "TRITONSERVER_ErrorCode");
  real_data_type_byte_size = dlsym(RTLD_NEXT, "TRITONSERVER_DataTypeByteSize");
  real_server_metrics = dlsym(RTLD_NEXT, "TRITONSERVER_ServerMetrics");
  batch_properties = dlsym(RTLD_NEXT, "TRITONSERVER_ServerModelBatchProperties");
  error_new = dlsym(RTLD_NEXT, "TRITONSERVER_ErrorNew");
  error_delete = dlsym(RTLD_NEXT, "TRITONSERVER_ErrorDelete");
  real_error_message = dlsym(RTLD_NEXT, "TRITONSERVER_ErrorMessage");
  struct rlimit stack;
  if (getrlimit(RLIMIT_STACK, &stack) == 0) {
    /* The size of a thread's stack is the resource limit, or 2 MiB if there is no limit. */
    rlim_t of_a_thread = stack.rlim_cur == RLIM_INFINITY ? 2 << 20 : stack.rlim_cur;
    if (of_a_thread / STACK_OF_A_LEVEL < (rlim_t)most_nested) most_nested = (int)(of_a_thread / STACK_OF_A_LEVEL);
  }
  leave_environment();
  map_slots();
}

/* Appends text to the record of the request that this thread creates. Text that does not fit is left out. */
static void note(const char* text) {
  if (making.slot == NULL) return;
  for (; *text != '\0' && making.used < SLOT_BYTES - 1; text++) {
    making.slot[making.used++] = *text >= ' ' && *text <= '~' ? *text : '?';
  }
  making.slot[making.used] = '\0';
}

static void begin_note(const char* model) {
  if (slots == NULL) return;
  uint64_t number = atomic_fetch_add(&num_requests, 1) + 1;
  struct timespec now;
  struct tm local;
  clock_gettime(CLOCK_REALTIME, &now);
  localtime_r(&now.tv_sec, &local);
  making.slot = slots + (number - 1) % NUM_SLOTS * SLOT_BYTES;
  making.used = 0;
  char text[128];
  snprintf(text, sizeof text, "%llu %02d:%02d:%02d.%03ld ", (unsigned long long)number, local.tm_hour,
           local.tm_min, local.tm_sec, now.tv_nsec / 1000000);
  note(text);
  note(model);
}

static void describe(char* text, size_t size, const int64_t* shape, uint64_t num_dims) {
  size_t used = snprintf(text, size, "[");
  for (uint64_t dim = 0; dim < num_dims && used + 32 < size; dim++) {
    used += snprintf(text + used, size - used, dim ? ",%lld" : "%lld", (long long)shape[dim]);
  }
  snprintf(text + used, size - used, "]");
}

/* Returns whether the first dimension of this request's tensors is the batch dimension. */
static bool is_batch(const Request* request) {
  uint32_t flags = 0;
  void* pointer = NULL;
  if (request != making.request || batch_properties == NULL) return true;
  Error* error = batch_properties(making.server, making.model, making.version, &flags, &pointer);
  if (error != NULL) {
    error_delete(error);
    return true;
  }
  return (flags & BATCH_FIRST_DIM) != 0;
}

static const char DECOUPLED[] = "doesn't support models with decoupled transaction policy";

/* Triton's own errors about requests, with what it should have said. The front ends make the first ones, with the code
 * INTERNAL for JSON that is wrong. Errors of the core are made by other functions (MENDED_OF_CORE). */
static const struct {
  const char *said, *hint;
} MENDED[] = {
    {"failed to parse the request JSON buffer", ""},
    {"Unable to parse 'data': Shape does not match",
     "; generate takes a list of numbers as [1, 2, 3], without the batch dimension"},
    {"Unable to parse '", ""},
    {"Unable to parse JSON", ""},
    {"attempt to get members for non-object", ": the body must be a JSON object"},
    {DECOUPLED,
     "; tensorrt_llm_infer takes the tensors of tensorrt_llm and gives one response"},
};
/* What a value of each data type is in JSON. */
static const char* const EXPECTED[NUM_TYPES] = {
    "another value",       "true or false",       "integers from 0",     "integers from 0",     "integers from 0",
    "integers from 0",     "integers",            "integers",            "integers",            "integers",
    "numbers",             "numbers",             "numbers",             "texts",               "numbers"};
static const struct {
  const char *said, *hint;
} MENDED_OF_CORE[] = {
    {"batch size does not match other inputs",
     "; the first dimension of every input is the batch: [1, n] for the n ids of one prompt, [1, 1] for one number"},
    {"request has 0 inputs", "; expected the inputs of the model"},
    {"unexpected inference input '", "; the model's metadata has the names of its inputs"},
    {"unexpected inference output '", "; the model's metadata has the names of its outputs"},
};

const char* TRITONSERVER_ErrorMessage(Error* error) {
  static _Thread_local char text[1024];
  if (real_error_message == NULL) real_error_message = dlsym(RTLD_NEXT, "TRITONSERVER_ErrorMessage");
  const char* said = real_error_message(error);
  for (size_t each = 0; real_request_new != NULL && said != NULL && each < sizeof MENDED_OF_CORE / sizeof *MENDED_OF_CORE; each++) {
    const char *mended = MENDED_OF_CORE[each].said, *hint = MENDED_OF_CORE[each].hint;
    if (strstr(said, mended) == NULL || strstr(said, hint) != NULL) continue; /* a text may come twice */
    snprintf(text, sizeof text, "%.700s%s", said, hint);
    return text;
  }
  return said;
}

/* Clients get the text of errors. When the Python backend's shared memory is full, its error has the name of the region.
 * The full text is then logged, and the client gets the text without the name. */
Error* TRITONSERVER_ErrorNew(int code, const char* text) {
  static const char before[] = "shared memory pool size for key '";
  char said[1024];
  arrival.code = (unsigned)code;
  if (error_new == NULL) error_new = dlsym(RTLD_NEXT, "TRITONSERVER_ErrorNew");
  for (size_t each = 0; text != NULL && each < sizeof MENDED / sizeof *MENDED; each++) {
    if (strstr(text, MENDED[each].said) == NULL) continue;
    char field[256] = "";
    if (strncmp(text, "Unable to parse", 15) == 0 && making.request != NULL) {
      /* infer adds an input before it reads its values, and generate afterwards. */
      int type = making.data_type >= 0 && making.data_type < NUM_TYPES ? making.data_type : 0;
      bool is_first = making.input[0] == '\0';
      if (is_generate && is_first) snprintf(field, sizeof field, "; the faulty value is that of the first input in the body");
      else if (is_generate) snprintf(field, sizeof field, "; the faulty value comes after %s in the body", making.input);
      else if (!is_first) {
        const char* expected = strstr(text, "Shape does not match") ? "as many values as its shape has" : EXPECTED[type];
        snprintf(field, sizeof field, "; %s: expected %s", making.input, expected);
      }
    }
    const char* hint = is_generate || strstr(text, "Shape does not match") == NULL ? MENDED[each].hint : "";
    snprintf(said, sizeof said, "%.500s%s%s", text, field, hint);
    if (code == INTERNAL) arrival.code = INVALID_ARG;
    if (strstr(text, DECOUPLED) != NULL) end_arrival(); /* no request is made */
    return error_new((int)arrival.code, said);
  }
  const char* name = text == NULL ? NULL : strstr(text, before);
  const char* end = name == NULL ? NULL : strchr(name + sizeof before - 1, '\'');
  if (end == NULL) return error_new(code, text);
  snprintf(said, sizeof said, "%.*s…%.512s", (int)(name + sizeof before - 1 - text), text, end);
  fprintf(stderr, "%s\n", text);
  return error_new(code, said);
}

static Error* refusal(const char* name, const char* shape, const char* expected) {
  char text[1024];
  snprintf(text, sizeof text, "%.256s: got the shape %s, expected %s", name, shape, expected);
  note("; refused");
  arrival.code = INVALID_ARG;
  return error_new(INVALID_ARG, text);
}

/* Returns the error of a shape that must be refused, or NULL. */
static Error* check_shape(const Request* request, const char* name, int data_type, const int64_t* shape,
                          uint64_t num_dims, const char* described) {
  bool is_empty = false;
  uint64_t size = data_type >= 0 && data_type < NUM_TYPES ? BYTES_OF[data_type] : 1;
  for (uint64_t dim = 0; dim < num_dims; dim++) {
    if (shape[dim] == 0) is_empty = true;
    if (shape[dim] < 0) return refusal(name, described, "no negative dimension");
    /* Even if one dimension is 0, the product of the others can overflow, because they are multiplied one by one. */
    if (shape[dim] > 0 && __builtin_mul_overflow(size, (uint64_t)shape[dim], &size)) size = UINT64_MAX;
    if (size > (is_http ? MAX_HTTP_BYTES : MAX_BYTES)) {
      return refusal(name, described, is_http ? "a tensor of at most 256 MiB" : "a tensor of less than 2 GiB");
    }
  }
  if (is_empty && num_dims > 0 && shape[0] == 0 && is_batch(request)) {
    return refusal(name, described, "at least one element in the first dimension, which is the batch");
  }
  return NULL;
}

/* Notes the code of an error of Triton's core, and returns the error. */
static Error* with_code(Error* error) {
  if (error != NULL && error_code != NULL) arrival.code = (unsigned)error_code(error);
  return error;
}

/* The front ends call this before they make a request that must have one response. */
Error* TRITONSERVER_ServerModelTransactionProperties(Server* server, const char* model, int64_t version,
                                                     uint32_t* flags, void** pointer) {
  begin_arrival(model);
  is_generate = false;
  Error* error = with_code(real_transaction_properties(server, model, version, flags, pointer));
  if (error != NULL) end_arrival();
  return error;
}

/* generate asks for the tensors of its model first. */
Error* TRITONSERVER_ServerModelMetadata(Server* server, const char* model, int64_t version, void** metadata) {
  is_generate = true;
  Error* error = with_code(real_model_metadata(server, model, version, metadata));
  if (error != NULL && is_http && is_post) {
    begin_arrival(model);
    with_code(error);
    end_arrival();
  }
  return error;
}

Error* TRITONSERVER_InferenceRequestNew(Request** request, Server* server, const char* model, int64_t version) {
  begin_arrival(model);
  Error* error = with_code(real_request_new(request, server, model, version));
  output_is_text = false;
  making.request = error == NULL ? *request : NULL;
  making.server = server;
  making.version = version;
  making.slot = NULL;
  making.input[0] = '\0';
  snprintf(making.model, sizeof making.model, "%s", model);
  begin_note(making.model);
  if (error != NULL) {
    note("; refused");
    end_arrival();
  }
  return error;
}

Error* TRITONSERVER_ServerInferAsync(Server* server, Request* request, void* trace) {
  Error* error = with_code(real_infer_async(server, request, trace));
  if (request == making.request) {
    making.request = NULL;
    if (error == NULL) arrival.is_open = false;
    else end_arrival();
  }
  return error;
}

Error* TRITONSERVER_InferenceRequestDelete(Request* request) {
  if (request == making.request) {
    making.request = NULL;
    end_arrival();
  }
  return real_request_delete(request);
}

Error* TRITONSERVER_InferenceRequestSetId(Request* request, const char* id) {
  if (request == making.request && *id != '\0') {
    note(" id ");
    note(id);
    snprintf(arrival.id, sizeof arrival.id, "%s", id);
  }
  return real_set_id(request, id);
}

Error* TRITONSERVER_InferenceRequestAddInput(Request* request, const char* name, int data_type,
                                             const int64_t* shape, uint64_t num_dims) {
  char described[256];
  describe(described, sizeof described, shape, num_dims);
  output_is_text = false;
  if (request == making.request) {
    note(" ");
    note(name);
    note(described);
  }
  if (request == making.request) {
    snprintf(making.input, sizeof making.input, "%s", name);
    making.data_type = data_type;
  }
  Error* error = check_shape(request, name, data_type, shape, num_dims, described);
  return error != NULL ? error : with_code(real_add_input(request, name, data_type, shape, num_dims));
}

Error* TRITONSERVER_InferenceResponseOutput(Response* response, uint32_t index, const char** name, int* data_type,
                                            const int64_t** shape, uint64_t* num_dims, const void** base,
                                            size_t* num_bytes, int* memory_type, int64_t* memory_id, void** user) {
  Error* error = real_response_output(response, index, name, data_type, shape, num_dims, base, num_bytes,
                                      memory_type, memory_id, user);
  output_is_text = error == NULL && *data_type == BYTES;
  return error;
}

/* The real function returns 0 for texts, and the front ends divide by it when a client asks to classify an output. If it
 * returns another number, they report that texts cannot be classified. They call this function for classification only. */
uint32_t TRITONSERVER_DataTypeByteSize(int data_type) {
  return data_type == BYTES && output_is_text ? 1 : real_data_type_byte_size(data_type);
}

/* Waits a short time until the model that listens at `path` has published its metrics. */
static void have_published(const char* path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  struct timeval patience = {.tv_usec = 400000};
  char end;
  int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (file < 0) return;
  setsockopt(file, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(file, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (snprintf(address.sun_path, sizeof address.sun_path, "%s", path) < (int)sizeof address.sun_path &&
      connect(file, (struct sockaddr*)&address, sizeof address) == 0 && read(file, &end, 1) > 0) {
    /* The model sends nothing: it closes the connection when it is done. */
  }
  close(file);
}

Error* TRITONSERVER_ServerMetrics(Server* server, void** metrics) {
  const char* folder = getenv("XDG_RUNTIME_DIR");
  char pattern[4096];
  glob_t found;
  if (folder != NULL && snprintf(pattern, sizeof pattern, "%s/metrics-*", folder) < (int)sizeof pattern &&
      glob(pattern, GLOB_NOSORT, NULL, &found) == 0) {
    for (size_t index = 0; index < found.gl_pathc; index++) have_published(found.gl_pathv[index]);
    globfree(&found);
  }
  return real_server_metrics(server, metrics);
}

/* The nesting depth of JSON received on a connection. A line may begin outside of a string, inside a string, or after a
 * backslash inside a string: the headers of a request and the sizes of chunks end in newlines, and a chunk may begin
 * anywhere in a string. So all three states are tracked, each beginning with the largest depth at the end of the previous
 * line. One of the three is correct; the other two may count brackets inside texts. */
enum { NUM_STARTS = 3, NUM_CONNECTIONS = 1 << 16 }; /* with more connections, some share an entry */

typedef struct {
  int32_t depth;
  bool in_string, is_escaped;
} Nesting;

static Nesting nestings[NUM_CONNECTIONS][NUM_STARTS];

static Nesting* nesting_of(int file) { return nestings[file % NUM_CONNECTIONS]; }

static void begin_line(Nesting* nesting, int32_t depth) {
  nesting[0] = (Nesting){depth, false, false};
  nesting[1] = (Nesting){depth, true, false};
  nesting[2] = (Nesting){depth, true, true};
}

static int32_t follow(Nesting* now, char each) {
  if (now->is_escaped) now->is_escaped = false;
  else if (each == '"') now->in_string = !now->in_string;
  else if (each == '\\') now->is_escaped = now->in_string;
  else if (!now->in_string && (each == '[' || each == '{')) now->depth++;
  else if (!now->in_string && (each == ']' || each == '}') && now->depth > 0) now->depth--;
  return now->depth;
}

static bool is_too_deep(Nesting* nesting, const char* data, size_t size) {
  int32_t deepest = 0;
  for (const char* end = data + size; data < end; data++) {
    int32_t depth = 0;
    for (int start = 0; start < NUM_STARTS; start++) {
      int32_t found = follow(&nesting[start], *data);
      if (found > depth) depth = found;
    }
    if (depth > deepest) deepest = depth;
    if (*data == '\n') begin_line(nesting, depth);
  }
  return deepest > most_nested;
}

/* The HTTP front end reads its connections with this call only; the gRPC front end uses another. */
ssize_t readv(int file, const struct iovec* parts, int num_parts) {
  ssize_t count = real_readv(file, parts, num_parts);
  if (real_request_new == NULL || file < 0) return count;
  is_http = true;
  if (count >= 5 && num_parts > 0 && parts[0].iov_len >= 5) {
    if (memcmp(parts[0].iov_base, "POST ", 5) == 0) is_post = true;
    else if (memcmp(parts[0].iov_base, "GET ", 4) == 0) is_post = false;
  }
  ssize_t left = count;
  for (int part = 0; part < num_parts && left > 0; part++) {
    size_t size = (size_t)left < parts[part].iov_len ? (size_t)left : parts[part].iov_len;
    if (is_too_deep(nesting_of(file), parts[part].iov_base, size)) {
      fprintf(stderr, "a connection was closed: JSON nested deeper than %d levels came by it\n", most_nested);
      begin_line(nesting_of(file), 0);
      errno = ECONNRESET;
      return -1;
    }
    left -= (ssize_t)size;
  }
  return count;
}

/* The answered request has been parsed, so the next request of the connection begins. */
ssize_t writev(int file, const struct iovec* parts, int num_parts) {
  if (file >= 0) begin_line(nesting_of(file), 0);
  return real_writev(file, parts, num_parts);
}

int accept(int file, struct sockaddr* address, socklen_t* size) {
  int accepted = real_accept(file, address, size);
  if (accepted >= 0) begin_line(nesting_of(accepted), 0);
  return accepted;
}

int accept4(int file, struct sockaddr* address, socklen_t* size, int flags) {
  int accepted = real_accept4(file, address, size, flags);
  if (accepted >= 0) begin_line(nesting_of(accepted), 0);
  return accepted;
}

enum { STREAM_ERROR = -2 }; /* the only error of zlib that the HTTP front end handles */

/* The first fields of zlib's z_stream. */
typedef struct {
  void* next_in;
  unsigned avail_in;
  unsigned long total_in;
  void* next_out;
  unsigned avail_out;
  unsigned long total_out;
} Stream;

static int go_on_inflating(void* stream, int flush) {
  static int (*_Atomic real_inflate)(void*, int);
  if (real_inflate == NULL) {
    void* zlib = dlopen("libz.so.1", RTLD_LAZY | RTLD_NOLOAD); /* it may be loaded late */
    real_inflate = dlsym(zlib == NULL ? RTLD_NEXT : zlib, "inflate");
  }
  return real_inflate == NULL ? STREAM_ERROR : real_inflate(stream, flush);
}

int inflate(void* stream, int flush) {
  static _Thread_local Nesting nesting[NUM_STARTS];
  Stream* state = stream;
  if (real_request_new == NULL) return go_on_inflating(stream, flush);
  if (state->total_out == 0) begin_line(nesting, 0);
  char* unpacked = state->next_out;
  int status = go_on_inflating(stream, flush);
  if (state->total_out > (is_http ? MAX_HTTP_UNPACKED : MAX_UNPACKED)) return STREAM_ERROR;
  if (!is_http || unpacked == NULL) return status; /* gRPC messages are not JSON */
  return is_too_deep(nesting, unpacked, (char*)state->next_out - unpacked) ? STREAM_ERROR : status;
}
