/* Runs parts of some work in the threads of the OpenMP library that torch has loaded. They wait for torch's work already, so
 * other threads would take turns with them on the same cores. */

#ifndef ZO2CORE_PARALLEL_H
#define ZO2CORE_PARALLEL_H

#include <stddef.h>
#include <stdint.h>

/* OpenMP's GOMP_parallel: calls run(argument) in each of some threads, and returns when all calls have. */
typedef void parallel(void (*run)(void *), void *argument, unsigned threads, unsigned flags);

extern parallel *run_in_threads; /* NULL: there is no such library, and one thread does all */

struct work {
    void (*run)(const void *of, uint64_t first, uint64_t last);
    const void *of;
    uint64_t count;
    uint64_t at_once; /* in a part, which a thread takes when it has done its last one */
    uint64_t next;    /* the first that no thread has taken */
};

static void take_parts(void *argument) {
    struct work *work = argument;
    uint64_t first;
    while ((first = __atomic_fetch_add(&work->next, work->at_once, __ATOMIC_RELAXED)) < work->count) {
        const uint64_t left = work->count - first;
        work->run(work->of, first, first + (left < work->at_once ? left : work->at_once));
    }
}

/* Run a function of a first and an end on ranges of `count`, each of `at_once`. */
static inline void run_in_parts(
    void (*run)(const void *of, uint64_t first, uint64_t last), const void *of, uint64_t count, uint64_t at_once,
    unsigned threads) {
    if (!run_in_threads || threads < 2 || count <= at_once) {
        run(of, 0, count);
        return;
    }
    struct work work = {run, of, count, at_once, 0};
    run_in_threads(take_parts, &work, threads, 0);
}

#endif
