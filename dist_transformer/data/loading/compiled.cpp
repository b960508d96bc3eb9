// The loops of packing.py and collate.py, with the same results.

#include <algorithm>
#include <cstdint>
#include <vector>

constexpr int32_t POOL = 64, TILT = 4096, MOST = 1022, NEAR = 3, NOTHING = 1 << 28;

struct Pool {
    int32_t row[POOL], source[POOL], target[POOL], tilt[POOL];
};

static int32_t tilt_of(int64_t source, int64_t target, int64_t max_source, int64_t max_target) {
    return (int32_t)(source * TILT / max_source - target * TILT / max_target);
}

/* Packs a queue, step by step as `_pack_in_python` does. Returns the number of packs. `rows` gets the packs' rows end to end, `stops` where each pack ends in them, `sources`
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

/* The ids of one side of a shard: row i is values[offsets[i]] to values[offsets[i + 1]]. */
struct Lists {
    const char *values;
    const int32_t *offsets;
    int64_t id_bytes;
};

struct Shard {
    int64_t first, stop;
    Lists sides[2];
};

/* The arrays of one side of all micro-batches, as `Sizes` and `Buffers` describe them. */
struct Side {
    int64_t size, max_length;
    int64_t *tokens, *positions, *lengths;
    int32_t *offsets;
};

struct Row {
    const Shard *shard;
    int64_t number;
    const char *ids[2];
};

template <class Id> static void widen(const char *ids, int64_t count, int64_t *out) {
    for (int64_t i = 0; i < count; i++) out[i] = ((const Id *)ids)[i];
}

static void copy_ids(const Row &row, int side, int64_t count, int64_t *out) {
    if (row.shard->sides[side].id_bytes == 2)
        widen<uint16_t>(row.ids[side], count, out);
    else
        widen<uint32_t>(row.ids[side], count, out);
}

/* Adds one sentence, of `length` tokens, to offsets and positions. */
static void place(int64_t *positions, int32_t *offsets, int64_t start, int64_t length) {
    *offsets = (int32_t)start;
    for (int64_t i = 0; i < length; i++) positions[start + i] = i;
}

/* Builds what `build_in_numpy` builds. Rows are scattered over large files, so all rows of a micro-batch are requested
   before the first is read. Returns 0; or the tokens of a micro-batch that does not fit, -1 for a pair of
   no shard, -2 for too many sentences. */
extern "C" int64_t build_buffers(const Shard *shards, int64_t shard_count, const int64_t *pairs, const int64_t *counts,
                                 int64_t buffers, int64_t offset_count, int64_t bos, int64_t eos, int64_t ignored,
                                 const Side *sides, int64_t *labels) {
    std::vector<Row> rows;
    int64_t before = 0;
    for (int64_t buffer = 0; buffer < buffers; buffer++, before += counts[buffer - 1]) {
        int64_t count = counts[buffer];
        rows.resize(count);
        for (int64_t i = 0; i < count; i++) {
            int64_t pair = pairs[before + i];
            const Shard *shard = std::upper_bound(shards, shards + shard_count, pair,
                                                  [](int64_t id, const Shard &each) { return id < each.first; });
            if (shard == shards || pair >= (--shard)->stop) return -1;
            rows[i] = {shard, pair - shard->first, {}};
            for (const Lists &lists : shard->sides) __builtin_prefetch(lists.offsets + rows[i].number);
        }
        int64_t used[2] = {0, 0};
        for (int64_t i = 0; i < count; i++)
            for (int side = 0; side < 2; side++) {
                const Lists &lists = rows[i].shard->sides[side];
                const int32_t *offsets = lists.offsets + rows[i].number;
                int64_t ids = offsets[1] - offsets[0];
                rows[i].ids[side] = lists.values + offsets[0] * lists.id_bytes;
                __builtin_prefetch(rows[i].ids[side]);
                __builtin_prefetch(rows[i].ids[side] + ids * lists.id_bytes - 1);
                used[side] += sides[side].lengths[before + i] = ids + 1;
            }
        for (int side = 0; side < 2; side++) {
            int64_t unused = sides[side].size - used[side];
            if (unused < 0) return used[side];
            int64_t dummies = (unused + sides[side].max_length - 1) / sides[side].max_length;
            if (count + dummies >= offset_count) return -2;
        }
        for (int side = 0; side < 2; side++) {
            const Side &out = sides[side];
            int64_t *tokens = out.tokens + buffer * out.size, *positions = out.positions + buffer * out.size;
            int32_t *offsets = out.offsets + buffer * offset_count, *last = offsets + offset_count;
            int64_t *label = labels + buffer * out.size, start = 0;
            for (int64_t i = 0; i < count; i++) {
                int64_t length = out.lengths[before + i], ids = length - 1;
                place(positions, offsets++, start, length);
                /* `ids </s>` for the source; for the target `<s> ids`, and `ids </s>` as labels. */
                copy_ids(rows[i], side, ids, tokens + start + side);
                tokens[side ? start : start + ids] = side ? bos : eos;
                if (side) {
                    std::copy_n(tokens + start + 1, ids, label + start);
                    label[start + ids] = eos;
                }
                start += length;
            }
            std::fill(tokens + start, tokens + out.size, 0);
            if (side) std::fill(label + start, label + out.size, ignored);
            for (; start < out.size; start += out.max_length)
                place(positions, offsets++, start, std::min(out.max_length, out.size - start));
            std::fill(offsets, last, (int32_t)out.size);
        }
    }
    return 0;
}
