// Declarations shared by the parts of the stub: streams, each with a worker thread, and counters.
#pragma once
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct job {
  void (*run)(void *);
  void *what;
  struct job *next;
};
struct stream {
  int capturing, priority, has_worker;
  unsigned long asked, done;  // jobs queued and finished
  struct job *first, *last;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
};

struct stream *stream_of(cudaStream_t handle);
void enqueue(struct stream *stream, void (*run)(void *), void *what);
void settle(struct stream *stream, unsigned long until);
void settle_all(void);
void fake_settle(cudaStream_t handle);
void follow(struct stream *stream, struct stream *before, unsigned long at);
void launched(const void *kernel);
void name_kernel(const void *kernel, const char *name);
extern long products;
