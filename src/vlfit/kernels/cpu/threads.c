// Threads that help the caller, included by products.c.
//
// A job is a number of tasks that whoever is there takes, the calling thread too. It ends when no task is left and
// nobody works on one: a helper that has not been given a core yet is not waited for. OpenMP's regions end when
// every thread has been there, and where another program computes on the same cores, Linux lets that run on for
// milliseconds before a thread that was woken gets its turn, at any priority: a product of 0.2 ms then takes 2 to 3.
//
// Helpers look for the next job for HELPER_SPIN_NS and then sleep. One job runs at a time; a second caller, as of
// another engine, works alone.

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#define MAX_HELPERS 255
#define HELPER_SPIN_NS 100000
#define CALLER_SPIN_NS 20000  // before it gives way: a helper may wait for this very core

typedef void (*Work)(void *);

static struct {
    pthread_mutex_t caller;  // held while a job runs
    pthread_mutex_t sleep;
    pthread_cond_t wake;
    int helpers, sleepers;
    Work work;
    void *data;
    // Number of the job << 32 | places left for helpers << 16 | helpers at work. A helper enters by one exchange
    // that takes a place; without places the job is closed.
    uint64_t gate;
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, NULL, NULL, 0};

#define PLACE ((uint64_t)1 << 16)
#define PLACES(gate) ((gate) >> 16 & 0xffff)
#define AT_WORK(gate) ((gate) & 0xffff)
#define JOB(gate) ((gate) >> 32)

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Whether there is a job other than ``seen`` with a place left.
INLINE int is_open(uint64_t gate, uint32_t seen) { return PLACES(gate) && (uint32_t)JOB(gate) != seen; }

static void *help(void *unused) {
    (void)unused;
    uint32_t seen = 0;
    for (;;) {
        uint64_t gate = __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE);
        const int64_t until = now_ns() + HELPER_SPIN_NS;
        while (!is_open(gate, seen)) {
            for (int i = 0; i < 32 && !is_open(gate, seen); i++) {
                pause_briefly();
                gate = __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE);
            }
            if (is_open(gate, seen) || now_ns() < until) continue;
            pthread_mutex_lock(&pool.sleep);
            __atomic_add_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
            while (!is_open(gate = __atomic_load_n(&pool.gate, __ATOMIC_SEQ_CST), seen))
                pthread_cond_wait(&pool.wake, &pool.sleep);
            __atomic_sub_fetch(&pool.sleepers, 1, __ATOMIC_SEQ_CST);
            pthread_mutex_unlock(&pool.sleep);
        }
        if (!__atomic_compare_exchange_n(&pool.gate, &gate, gate - PLACE + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            continue;
        seen = (uint32_t)JOB(gate);
        pool.work(pool.data);
        __atomic_sub_fetch(&pool.gate, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

// In the child of a fork there is no helper, and perhaps a lock that nobody will release.
static void forget_helpers(void) {
    pthread_mutex_init(&pool.caller, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.helpers = pool.sleepers = 0;
    pool.gate = (uint64_t)JOB(pool.gate) << 32;
}

static void add_helpers(int wanted) {
    pthread_attr_t detached;
    static int is_first = 1;
    if (is_first) pthread_atfork(NULL, NULL, forget_helpers);
    is_first = 0;
    if (pthread_attr_init(&detached)) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    sigset_t every, before;  // signals are for the program's own threads
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    for (; pool.helpers < wanted; pool.helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, help, NULL)) break;  // with fewer it takes longer
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

// Call ``work(data)`` on this thread and on up to ``threads`` - 1 helpers. ``work`` takes tasks from ``data`` until
// there are none; it returns only when those it took are done.
static void in_parallel(Work work, void *data, int threads) {
    if (threads > MAX_HELPERS + 1) threads = MAX_HELPERS + 1;
    if (threads <= 1 || pthread_mutex_trylock(&pool.caller)) {
        work(data);
        return;
    }
    if (pool.helpers < threads - 1) add_helpers(threads - 1);
    pool.work = work;
    pool.data = data;
    const uint64_t number = (uint32_t)(JOB(__atomic_load_n(&pool.gate, __ATOMIC_RELAXED)) + 1);
    __atomic_store_n(&pool.gate, number << 32 | (uint64_t)(threads - 1) << 16, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&pool.sleepers, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.sleep);
    }
    work(data);
    uint64_t gate = __atomic_and_fetch(&pool.gate, ~((uint64_t)0xffff << 16), __ATOMIC_ACQ_REL);
    const int64_t until = AT_WORK(gate) ? now_ns() + CALLER_SPIN_NS : 0;
    for (int i = 1; AT_WORK(gate); i++) {
        pause_briefly();
        if (i % 32 == 0 && now_ns() >= until) sched_yield();
        gate = __atomic_load_n(&pool.gate, __ATOMIC_ACQUIRE);
    }
    pthread_mutex_unlock(&pool.caller);
}
