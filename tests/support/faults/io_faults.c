/* Fails calls of the system on files below one folder. Preloaded; armed from Python by io_faults.py.

   Each call of a kind below has a number, in the order of the process. `ctl_fault_arm` chooses the number
   that fails, and the kinds of which every later one does. With 0 the calls are only logged. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdio_ext.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define SHORT_WRITE (-1000)

static char root[4096];
static size_t root_length;
static volatile long counter, fail_at;
static volatile int error_number, log_file = -1, armed;
static char kinds[256];

/* Chooses the folder, the number and its error (SHORT_WRITE: half of the bytes; another negative number:
   the call works, and this process gets that signal); `also` names the kinds that fail from then on, and
   `log` the file of the calls. */
void ctl_fault_arm(const char *folder, long number, int error, const char *also, const char *log) {
  armed = 0;
  if (log_file >= 0) close(log_file);
  log_file = log ? (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_TRUNC, 0600) : -1;
  strncpy(root, folder, sizeof root - 1);
  root_length = strlen(root);
  counter = 0;
  fail_at = number;
  error_number = error;
  strncpy(kinds, also, sizeof kinds - 1);
  armed = 1;
}

long ctl_fault_disarm(void) {
  armed = 0;
  if (log_file >= 0) close(log_file);
  log_file = -1;
  return counter;
}

static int is_inside(const char *path) {
  char absolute[8192];
  if (!path) return 0;
  if (path[0] != '/') {
    if (!getcwd(absolute, 4096)) return 0;
    strcat(absolute, "/");
    strncat(absolute, path, 4000);
    path = absolute;
  }
  return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || !path[root_length]);
}

static int of_descriptor(int file, char *path) {
  char name[64];
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  ssize_t length = readlink(name, path, 4095);
  if (length <= 0) return 0;
  path[length] = 0;
  return is_inside(path);
}

static void log_call(const char *kind, long number, const char *path, const char *other) {
  char line[12000];
  if (log_file < 0) return;
  int length = snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\n", number, kind, path, other);
  if (length > 0) syscall(SYS_write, log_file, line, (size_t)length);
}

/* Returns 1 if the call must fail, with errno set. */
static int fails(const char *kind, const char *path, const char *other) {
  int saved = errno;
  long number = __atomic_add_fetch(&counter, 1, __ATOMIC_SEQ_CST);
  log_call(kind, number, path, other);
  errno = saved;
  if (!fail_at || number < fail_at || (number > fail_at && !strstr(kinds, kind))) return 0;
  if (error_number < 0 && error_number != SHORT_WRITE) {
    kill(getpid(), -error_number);
    errno = saved;
    return 0;
  }
  errno = error_number == SHORT_WRITE ? ENOSPC : error_number;
  return 1;
}

#define REAL(type, name, ...)                              \
  static type (*real)(__VA_ARGS__);                        \
  if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static const char *at(int folder, const char *path, char *buffer) {
  if (!path || path[0] == '/' || folder == AT_FDCWD) return path;
  if (!of_descriptor(folder, buffer)) return path;
  strcat(buffer, "/");
  strncat(buffer, path, 4000);
  return buffer;
}

static mode_t mode_of(int flags, va_list rest) {
  return (flags & (O_CREAT | __O_TMPFILE)) ? va_arg(rest, mode_t) : 0;
}
#define OPENED(flags) ((flags) & O_CREAT ? "create" : "open")

#define OPEN(function)                                                                        \
  int function(const char *path, int flags, ...) {                                            \
    va_list rest;                                                                             \
    va_start(rest, flags);                                                                    \
    mode_t mode = mode_of(flags, rest);                                                       \
    va_end(rest);                                                                             \
    REAL(int, #function, const char *, int, ...);                                             \
    if (armed && is_inside(path) && fails(OPENED(flags), path, "")) return -1;                \
    return real(path, flags, mode);                                                           \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(function)                                                                      \
  int function(int folder, const char *path, int flags, ...) {                                \
    char buffer[9000];                                                                        \
    va_list rest;                                                                             \
    va_start(rest, flags);                                                                    \
    mode_t mode = mode_of(flags, rest);                                                       \
    va_end(rest);                                                                             \
    REAL(int, #function, int, const char *, int, ...);                                        \
    if (armed) {                                                                              \
      const char *whole = at(folder, path, buffer);                                           \
      if (is_inside(whole) && fails(OPENED(flags), whole, "")) return -1;                     \
    }                                                                                         \
    return real(folder, path, flags, mode);                                                   \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(function)                                                                       \
  FILE *function(const char *path, const char *mode) {                                        \
    REAL(FILE *, #function, const char *, const char *);                                      \
    if (armed && is_inside(path) && fails(mode[0] == 'r' ? "open" : "create", path, ""))      \
      return NULL;                                                                            \
    return real(path, mode);                                                                  \
  }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
  REAL(DIR *, "opendir", const char *);
  if (armed && is_inside(path) && fails("open", path, "")) return NULL;
  return real(path);
}

#define READ(function, parameters, arguments, ...)                                            \
  ssize_t function parameters {                                                               \
    char path[4096];                                                                          \
    REAL(ssize_t, #function, __VA_ARGS__);                                                    \
    if (armed && of_descriptor(file, path) && fails("read", path, "")) return -1;             \
    return real arguments;                                                                    \
  }
READ(read, (int file, void *buffer, size_t size), (file, buffer, size), int, void *, size_t)
READ(pread, (int file, void *buffer, size_t size, off_t offset), (file, buffer, size, offset), int,
     void *, size_t, off_t)
READ(pread64, (int file, void *buffer, size_t size, off64_t offset), (file, buffer, size, offset),
     int, void *, size_t, off64_t)

#define WRITE(function, parameters, arguments, half, ...)                                     \
  ssize_t function parameters {                                                               \
    char path[4096];                                                                          \
    REAL(ssize_t, #function, __VA_ARGS__);                                                    \
    if (armed && of_descriptor(file, path) && fails("write", path, "")) {                     \
      if (error_number == SHORT_WRITE && size > 1) return real half;                          \
      return -1;                                                                              \
    }                                                                                         \
    return real arguments;                                                                    \
  }
WRITE(write, (int file, const void *buffer, size_t size), (file, buffer, size),
      (file, buffer, size / 2), int, const void *, size_t)
WRITE(pwrite, (int file, const void *buffer, size_t size, off_t offset),
      (file, buffer, size, offset), (file, buffer, size / 2, offset), int, const void *, size_t, off_t)
WRITE(pwrite64, (int file, const void *buffer, size_t size, off64_t offset),
      (file, buffer, size, offset), (file, buffer, size / 2, offset), int, const void *, size_t,
      off64_t)

size_t fwrite(const void *buffer, size_t size, size_t count, FILE *stream) {
  char path[4096];
  REAL(size_t, "fwrite", const void *, size_t, size_t, FILE *);
  if (armed && of_descriptor(fileno(stream), path) && fails("write", path, "")) {
    if (error_number == SHORT_WRITE) real(buffer, 1, size * count / 2, stream);
    return 0;
  }
  return real(buffer, size, count, stream);
}

int fflush(FILE *stream) {
  char path[4096];
  REAL(int, "fflush", FILE *);
  if (armed && stream && __fpending(stream) && of_descriptor(fileno(stream), path) &&
      fails("write", path, ""))
    return EOF;
  return real(stream);
}

int fclose(FILE *stream) {
  char path[4096];
  REAL(int, "fclose", FILE *);
  if (armed && __fpending(stream) && of_descriptor(fileno(stream), path) &&
      fails("write", path, "")) {
    int number = errno;
    __fpurge(stream);
    real(stream);
    errno = number;
    return EOF;
  }
  return real(stream);
}

#define SYNC(function)                                                                        \
  int function(int file) {                                                                    \
    char path[4096];                                                                          \
    REAL(int, #function, int);                                                                \
    if (armed && of_descriptor(file, path) && fails("fsync", path, "")) return -1;            \
    return real(file);                                                                        \
  }
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  if (armed && is_inside(to) && fails("rename", from, to)) return -1;
  return real(from, to);
}

int renameat(int one, const char *from, int two, const char *to) {
  char first[9000], second[9000];
  REAL(int, "renameat", int, const char *, int, const char *);
  if (armed && is_inside(at(two, to, second)) &&
      fails("rename", at(one, from, first), at(two, to, second)))
    return -1;
  return real(one, from, two, to);
}

int renameat2(int one, const char *from, int two, const char *to, unsigned flags) {
  if (armed && is_inside(to) && fails(flags & 2 ? "exchange" : "rename", from, to)) return -1;
  return (int)syscall(SYS_renameat2, one, from, two, to, flags);
}

#define PATH(function, kind)                                                                  \
  int function(const char *path) {                                                            \
    REAL(int, #function, const char *);                                                       \
    if (armed && is_inside(path) && fails(kind, path, "")) return -1;                         \
    return real(path);                                                                        \
  }
PATH(unlink, "unlink")
PATH(rmdir, "unlink")

int unlinkat(int folder, const char *path, int flags) {
  char buffer[9000];
  REAL(int, "unlinkat", int, const char *, int);
  if (armed && is_inside(at(folder, path, buffer)) &&
      fails("unlink", at(folder, path, buffer), ""))
    return -1;
  return real(folder, path, flags);
}

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  if (armed && is_inside(path) && fails("mkdir", path, "")) return -1;
  return real(path, mode);
}
