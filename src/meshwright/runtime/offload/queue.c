/* A thread that runs batches of updates one after the other, in the order they are handed in.

   Whoever hands them in is Python, whose interpreter is often busy with driving the device: it comes back late. While it is
   away the next batch runs already. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

void meshwright_adam(const void *works, int num_works, int num_threads);

typedef struct Batch {
    struct Batch *next;
    void *works;
    int num_works;
} Batch;

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Batch *first, *last;
    int64_t num_handed, num_done;
    int num_threads, is_closed;
} Queue;

static Batch *next_batch(Queue *queue) {
    pthread_mutex_lock(&queue->lock);
    while (!queue->first && !queue->is_closed) pthread_cond_wait(&queue->changed, &queue->lock);
    Batch *batch = queue->first;
    if (batch) queue->first = batch->next;
    if (!queue->first) queue->last = NULL;
    pthread_mutex_unlock(&queue->lock);
    return batch;
}

static void *run(void *argument) {
    Queue *queue = argument;
    for (Batch *batch; (batch = next_batch(queue));) {
        meshwright_adam(batch->works, batch->num_works, queue->num_threads);
        free(batch->works);
        free(batch);
        pthread_mutex_lock(&queue->lock);
        queue->num_done++;
        pthread_cond_broadcast(&queue->changed);
        pthread_mutex_unlock(&queue->lock);
    }
    return NULL;
}

/* NULL where there is no thread to be had. */
Queue *meshwright_open(int num_threads) {
    Queue *queue = calloc(1, sizeof(Queue));
    if (!queue) return NULL;
    queue->num_threads = num_threads;
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->changed, NULL);
    if (pthread_create(&queue->thread, NULL, run, queue)) {
        free(queue);
        return NULL;
    }
    return queue;
}

/* Returns at once: the number to wait for, or 0 where there is no memory. */
int64_t meshwright_hand(Queue *queue, const void *works, size_t num_bytes, int num_works) {
    Batch *batch = malloc(sizeof(Batch));
    void *copy = malloc(num_bytes);
    if (!batch || !copy) {
        free(batch);
        free(copy);
        return 0;
    }
    memcpy(copy, works, num_bytes);
    *batch = (Batch){.next = NULL, .works = copy, .num_works = num_works};
    pthread_mutex_lock(&queue->lock);
    if (queue->last) queue->last->next = batch;
    else queue->first = batch;
    queue->last = batch;
    int64_t number = ++queue->num_handed;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
    return number;
}

/* Until the batch of this number, and all before it, are done. */
void meshwright_wait(Queue *queue, int64_t number) {
    pthread_mutex_lock(&queue->lock);
    while (queue->num_done < number) pthread_cond_wait(&queue->changed, &queue->lock);
    pthread_mutex_unlock(&queue->lock);
}

/* What was handed in is done first. */
void meshwright_close(Queue *queue) {
    pthread_mutex_lock(&queue->lock);
    queue->is_closed = 1;
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->lock);
    pthread_join(queue->thread, NULL);
    pthread_mutex_destroy(&queue->lock);
    pthread_cond_destroy(&queue->changed);
    free(queue);
}
