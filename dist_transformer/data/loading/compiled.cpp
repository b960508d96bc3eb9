// The loop of packing.py, step by step the same: see `_pack_in_python` for what it does and why.

#include <cstdint>

constexpr int32_t POOL = 64, TILT = 4096, MOST = 1022, NEAR = 3, NOTHING = 1 << 28;

struct Pool {
    int32_t row[POOL], source[POOL], target[POOL], tilt[POOL];
};

static int32_t tilt_of(int64_t source, int64_t target, int64_t max_source, int64_t max_target) {
    return (int32_t)(source * TILT / max_source - target * TILT / max_target);
}

/* Returns the number of packs. `rows` gets the packs' rows end to end, `stops` where each pack ends in them, `sources`
   and `targets` the tokens of each pack, and `left` the rows of no pack. All have room for `pairs` entries. */
extern "C" int64_t pack_pairs(const int32_t *sizes, int64_t pairs, int32_t max_source, int32_t max_target, int32_t max_sentences,
                   int32_t room_source, int32_t room_target, int32_t is_last, int32_t *rows, int32_t *stops,
                   int32_t *sources, int32_t *targets, int32_t *left) {
    Pool pool;
    int64_t head = 0, out = 0, packs = 0;

#define REFILL(slot)                                                                                 \
    do {                                                                                             \
        int filled_ = (slot), has_ = head < pairs;                                                   \
        pool.row[filled_] = has_ ? (int32_t)head : -1;                                               \
        pool.source[filled_] = has_ ? sizes[2 * head] : NOTHING;                                     \
        pool.target[filled_] = has_ ? sizes[2 * head + 1] : NOTHING;                                 \
        pool.tilt[filled_] = has_ ? tilt_of(sizes[2 * head], sizes[2 * head + 1], max_source, max_target) : 0; \
        head += has_;                                                                                \
    } while (0)
#define TAKE(slot)                              \
    do {                                        \
        source -= pool.source[slot];            \
        target -= pool.target[slot];            \
        rows[out++] = pool.row[slot];           \
        REFILL(slot);                           \
    } while (0)

    for (int slot = 0; slot < POOL; slot++) REFILL(slot);
    while (is_last ? out < pairs : pairs - head >= max_sentences) {
        int32_t source = max_source, target = max_target;
        int64_t end = out + max_sentences;
        int oldest = (int)(packs % POOL);
        if (pool.row[oldest] >= 0) TAKE(oldest);
        while (out < end && head < pairs && sizes[2 * head] <= source - room_source &&
               sizes[2 * head + 1] <= target - room_target) {
            source -= sizes[2 * head];
            target -= sizes[2 * head + 1];
            rows[out++] = (int32_t)head++;
        }
        while (out < end) {
            int32_t best = INT32_MAX, room = tilt_of(source, target, max_source, max_target);
            for (int slot = 0; slot < POOL; slot++) {
                int32_t source_left = source - pool.source[slot], target_left = target - pool.target[slot];
                int32_t most = source_left > target_left ? source_left : target_left;
                int32_t apart = pool.tilt[slot] - room;
                apart = (apart < 0 ? -apart : apart) + NEAR + 1;
                apart = apart > MOST ? MOST : apart;
                most = most < 0 ? 0 : most;
                /* All bits of what does not fit: written without branches, so that compilers use vectors. */
                int32_t key = ((most <= NEAR ? most : apart) * POOL + slot) | (((source_left | target_left) >> 31) & INT32_MAX);
                best = key < best ? key : best;
            }
            if (best == INT32_MAX) break;
            TAKE(best % POOL);
        }
        sources[packs] = max_source - source;
        targets[packs] = max_target - target;
        stops[packs++] = (int32_t)out;
    }
    for (int slot = 0; slot < POOL; slot++)
        if (pool.row[slot] >= 0) *left++ = pool.row[slot];
    for (; head < pairs; head++) *left++ = (int32_t)head;
    return packs;
}
