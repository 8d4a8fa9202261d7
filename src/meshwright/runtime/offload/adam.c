/* Adam and AdamW on the host, one pass over memory: the gradient is read as it arrived (16 or 32 bits), the master weight and
   both moments are updated, and the new parameter is written in the dtype the device computes in.

       g   = scale · gradient                (+ decay · p, Adam)
       p   = p · (1 - rate · decay)          (AdamW)
       m  += (1 - beta1) · (g - m)
       v   = beta2 · v + (1 - beta2) · g²
       p  += (-rate / correction1) · m / (√v / √correction2 + eps)

   Moments may be kept in bf16: they are read as fp32, the update uses the new ones as they are, and what is kept is rounded. The
   first goes to the nearest, ties to even. The second may change by less than half a unit in its last place in every step
   (1 - beta2 = 0.001 against 2^-9), and to the nearest would never move: it goes up or down at random, in proportion to how near
   each is, so that its mean is right. The random number is a hash of step and place: the same whoever does the work.

   Operations and their order are those of torch's fused optimizers on a CPU, so that results are equal to the last bit; hence no
   contraction into fused multiply-adds (-ffp-contract=off). Work is handed out in small chunks: a core that is busy with
   something else takes fewer of them and holds nobody up. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define CHUNK 32768

enum { FLOAT32 = 0, BFLOAT16 = 1 };

static inline float widened(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

/* To the nearest, ties to even; what is not a number stays one. */
static inline uint16_t narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* 32 well-mixed bits of a place and a seed (the finaliser of MurmurHash3). */
static inline uint32_t mixed(uint32_t place, uint32_t seed) {
    uint32_t bits = place * 0x9e3779b1u ^ seed;
    bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
    bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
    return bits ^ (bits >> 16);
}

/* Up or down at random, so that the mean is the value. */
static inline uint16_t dithered(float value, uint32_t noise) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + (noise & 0xffffu)) >> 16);
}

typedef struct {
    float rate_decay, decay, weight1, beta2, weight2, step_size, root2, eps, scale;
    int32_t decoupled, near;
} Settings;

static inline void update(float *p, float *m, float *v, float g, const Settings *s) {
    float w = *p;
    if (s->decoupled) w = w * s->rate_decay;
    else g = fmaf(w, s->decay, g);
    *m = s->near ? fmaf(s->weight1, g - *m, *m) : g - (g - *m) * (1.0f - s->weight1);
    *v = fmaf(s->weight2 * g, g, *v * s->beta2);
    *p = w + s->step_size * *m / (sqrtf(*v) / s->root2 + s->eps);
}

static inline void update16(float *p, uint16_t *m, uint16_t *v, float g, const Settings *s, uint32_t noise) {
    float first = widened(*m), second = widened(*v);
    update(p, &first, &second, g, s);
    *m = narrowed(first);
    *v = dithered(second, noise);
}

typedef struct {
    float *p;
    void *m, *v;
    const void *gradient;
    uint16_t *narrow; /* where the new parameter also goes, in bf16; may be the gradient's memory, or nothing */
    int64_t count;
    int32_t gradient_kind, moment_kind;
    uint32_t seed; /* of the noise in moments of 16 bits */
    Settings settings;
} Work;

static int64_t chunks_of(const Work *work) { return (work->count + CHUNK - 1) / CHUNK; }

static void update_chunk(const Work *work, int64_t chunk) {
    const Settings s = work->settings;
    float *p = work->p, *m = work->m, *v = work->v;
    uint16_t *m16 = work->m, *v16 = work->v, *narrow = work->narrow;
    uint32_t seed = mixed(work->seed, 0x5bd1e995u);
    int64_t first = chunk * CHUNK, last = first + CHUNK < work->count ? first + CHUNK : work->count;
    if (work->moment_kind == BFLOAT16 && work->gradient_kind == BFLOAT16) {
        const uint16_t *g = work->gradient;
#pragma omp simd
        for (int64_t i = first; i < last; i++)
            update16(p + i, m16 + i, v16 + i, widened(g[i]) * s.scale, &s, mixed((uint32_t)i, seed));
    } else if (work->moment_kind == BFLOAT16) {
        const float *g = work->gradient;
#pragma omp simd
        for (int64_t i = first; i < last; i++)
            update16(p + i, m16 + i, v16 + i, g[i] * s.scale, &s, mixed((uint32_t)i, seed));
    } else if (work->gradient_kind == BFLOAT16) {
        const uint16_t *g = work->gradient;
#pragma omp simd
        for (int64_t i = first; i < last; i++) update(p + i, m + i, v + i, widened(g[i]) * s.scale, &s);
    } else {
        const float *g = work->gradient;
#pragma omp simd
        for (int64_t i = first; i < last; i++) update(p + i, m + i, v + i, g[i] * s.scale, &s);
    }
    if (narrow) {
#pragma omp simd
        for (int64_t i = first; i < last; i++) narrow[i] = narrowed(p[i]);
    }
}

/* Many pieces in one call: whoever calls need not come back for each, and threads go on to the next piece without waiting for
   one another. */
void meshwright_adam(const Work *works, int num_works, int num_threads) {
    int64_t num_chunks = 0;
    for (int i = 0; i < num_works; i++) num_chunks += chunks_of(works + i);
#pragma omp parallel num_threads(num_threads)
    {
        const Work *work = works; /* chunks come to a thread in rising order: its piece is this one or a later one */
        int64_t before = 0;
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
            while (chunk - before >= chunks_of(work)) before += chunks_of(work++);
            update_chunk(work, chunk - before);
        }
    }
}

/* sum += gradient, or sum = gradient for the first of a step. */
void meshwright_accumulate(float *sum, const void *gradient, int gradient_kind, int is_first, int64_t count, int num_threads) {
    int64_t num_chunks = (count + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(dynamic, 2) num_threads(num_threads)
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        int64_t first = chunk * CHUNK, last = first + CHUNK < count ? first + CHUNK : count;
        if (gradient_kind == BFLOAT16) {
            const uint16_t *g = gradient;
#pragma omp simd
            for (int64_t i = first; i < last; i++) sum[i] = (is_first ? 0.0f : sum[i]) + widened(g[i]);
        } else {
            const float *g = gradient;
#pragma omp simd
            for (int64_t i = first; i < last; i++) sum[i] = (is_first ? 0.0f : sum[i]) + g[i];
        }
    }
}
