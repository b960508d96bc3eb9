// Kernels of the model on a CPU, for `cpu_kernels.py`, which compiles them.
//
// Attention over packed sentences, forward and backward:
//
//     S = Q K^T / sqrt(d_k)    P = softmax(S)    O = P V                                     (section 3.2.1)
//     dV = P^T dO    dP = dO V^T    dS = P * (dP - rowsum(P * dP))    dQ = dS K / sqrt(d_k)    dK = dS^T Q / sqrt(d_k)
//
// A task is one head of one sentence, copied to fp32 buffers that fit in the caches: no padding, no mask, no scores in
// memory. No two tasks write to the same place, so the result does not depend on the number of threads.
//
// For decoding: attention from the hypotheses of a beam, each of which sees only the entries of its own past, and the
// most probable tokens of each row of logits, by log softmax and selection in two passes over a row, the second of which
// finds it in the cache.
//
// The residual connection of a sublayer, z = LayerNorm(x + Dropout(y)), forward and backward, in one pass over each row.
//
// The gradients of a bias and of a ReLU, and the softmax of the loss with its gradient, each in one pass over memory.
//
// The transpose of a matrix, and what surrounds a product of integers.

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, TILE_ROWS = 6;
#else
constexpr int LANES = 4, TILE_ROWS = 4;
#endif
// Columns of a tile; row lengths in buffers are padded to a multiple of this.
constexpr int WIDTH = 16;
constexpr int VECTORS = WIDTH / LANES;

// Buffers need no alignment.
typedef float Floats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

int64_t padded(int64_t count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

// bf16 is the upper half of fp32.
struct BFloat16 {
    uint16_t bits;
};

float to_float(float value) { return value; }

float to_float(BFloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

void assign(float& place, float value) { place = value; }

void assign(BFloat16& place, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    // Round to nearest, ties to even; NaN stays NaN.
    place.bits = std::isnan(value) ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

Floats load(const BFloat16* from) {
    Ints bits;
    for (int l = 0; l < LANES; l++) bits[l] = int32_t(uint32_t(from[l].bits) << 16);
    return (Floats)bits;
}

// C[r][c] (+)= sum over k < depth of A[r, k] B[k][c], for R rows and WIDTH columns. A has any strides.
template <int R>
void multiply_tile(const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t b_step, float* c,
                   int64_t c_step, int64_t depth, bool add) {
    Floats sums[R][VECTORS] = {};
    for (int64_t k = 0; k < depth; k++) {
        Floats row[VECTORS];
        for (int v = 0; v < VECTORS; v++) row[v] = *reinterpret_cast<const Floats*>(b + k * b_step + v * LANES);
        for (int r = 0; r < R; r++) {
            float factor = a[r * row_step + k * depth_step];
            for (int v = 0; v < VECTORS; v++) sums[r][v] += factor * row[v];
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) {
            Floats* place = reinterpret_cast<Floats*>(c + r * c_step + v * LANES);
            *place = add ? *place + sums[r][v] : sums[r][v];
        }
}

template <int R>
void multiply_rows(int64_t rows, const float* a, int64_t row_step, int64_t depth_step, const float* b, int64_t b_step,
                   float* c, int64_t c_step, int64_t depth, bool add) {
    if (rows == R) multiply_tile<R>(a, row_step, depth_step, b, b_step, c, c_step, depth, add);
    else if constexpr (R > 1) multiply_rows<R - 1>(rows, a, row_step, depth_step, b, b_step, c, c_step, depth, add);
}

// C (+)= A B; `columns` is a multiple of WIDTH.
void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t row_step, int64_t depth_step,
              const float* b, int64_t b_step, float* c, int64_t c_step, bool add = false) {
    for (int64_t column = 0; column < columns; column += WIDTH)
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            int64_t count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
            multiply_rows<TILE_ROWS>(count, a + row * row_step, row_step, depth_step, b + column, b_step,
                                     c + row * c_step + column, c_step, depth, add);
        }
}

// e^x for x <= 0, relative error 2e-7: x = n ln 2 + r, a polynomial for e^r, and n added to its exponent.
Floats exponential(Floats x) {
    const Floats lowest = Floats{} - 87.0f;
    x = x < lowest ? lowest : x;  // NaN stays
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
    const float round = 12582912.0f;
    Floats shifted = x * 1.44269504f + round;
    Ints exponent = (Ints)shifted << 23;
    Floats n = shifted - round;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = Floats{} + 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    Ints result = (Ints)p + exponent;
    return (Floats)result;
}

// The largest number of a vector, found by halves. One by one, each comparison would wait for the previous one.
float largest_of(Floats vector) {
    float halves[LANES];
    std::memcpy(halves, &vector, sizeof halves);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) halves[l] = halves[l + half] > halves[l] ? halves[l + half] : halves[l];
    return halves[0];
}

// The sum of a vector, found by halves for the same reason.
float sum_of(Floats vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)vector);
#endif
    float halves[LANES];
    std::memcpy(halves, &vector, sizeof halves);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int l = 0; l < half; l++) halves[l] += halves[l + half];
    return halves[0];
}

// The largest of a row's first `count` values; `count` is at least 1.
float largest(const float* row, int64_t count) {
    float result = row[0];
    int64_t j = 0;
    if (count >= LANES) {
        Floats highest = *reinterpret_cast<const Floats*>(row);
        for (j = LANES; j + LANES <= count; j += LANES) {
            Floats values = *reinterpret_cast<const Floats*>(row + j);
            highest = values > highest ? values : highest;
        }
        result = largest_of(highest);
    }
    for (; j < count; j++) result = row[j] > result ? row[j] : result;
    return result;
}

// Replaces a row by e^(row * scale - shift) at its first `seen` places and 0 after them; returns the sum.
float exponentials(float* row, int64_t seen, int64_t width, float scale, float shift) {
    Floats sums = {};
    // The last vector also computes values beyond `seen`; they may not be finite, and are overwritten.
    int64_t whole = seen / LANES * LANES;
    for (int64_t j = 0; j < seen; j += LANES) {
        Floats* place = reinterpret_cast<Floats*>(row + j);
        *place = exponential(*place * scale - shift);
        if (j < whole) sums += *place;
    }
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += sums[l];
    for (int64_t j = whole; j < seen; j++) sum += row[j];
    for (int64_t j = seen; j < width; j++) row[j] = 0;
    return sum;
}

// Sum of the products of two rows.
float dot(const float* a, const float* b, int64_t count) {
    Floats sums = {};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES)
        sums += *reinterpret_cast<const Floats*>(a + j) * *reinterpret_cast<const Floats*>(b + j);
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += sums[l];
    for (; j < count; j++) sum += a[j] * b[j];
    return sum;
}

template <typename T>
void copy_transposed(const T* from, int64_t from_step, int64_t rows, int64_t width, float* to, int64_t to_step) {
    for (int64_t c = 0; c < width; c++)
        for (int64_t i = 0; i < rows; i++) to[c * to_step + i] = to_float(from[i * from_step + c]);
}

template <typename T>
void write_rows(const float* from, int64_t from_step, int64_t rows, int64_t width, T* to, int64_t to_step) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t c = 0; c < width; c++) assign(to[i * to_step + c], from[i * from_step + c]);
}

// A thread's memory, cut into buffers.
class Buffers {
   public:
    explicit Buffers(int64_t size) {
        if (int64_t(memory.size()) < size) memory.resize(size);
        next = memory.data();
    }

    float* take(int64_t size) {
        float* buffer = next;
        next += size;
        return buffer;
    }

    float* take_zeros(int64_t size) {
        float* buffer = take(size);
        std::memset(buffer, 0, size * sizeof(float));
        return buffer;
    }

   private:
    static thread_local std::vector<float> memory;
    float* next;
};

thread_local std::vector<float> Buffers::memory;

// Rows in fp32 whose width is a multiple of WIDTH.
struct Rows {
    const float* data;
    int64_t step;
};

// Returns the rows themselves if they are in this form, otherwise a copy of them.
template <typename T>
Rows rows_of(const T* from, int64_t from_step, int64_t rows, int64_t width, float* buffer) {
    const int64_t columns = padded(width);
    if constexpr (sizeof(T) == sizeof(float)) {
        if (columns == width) return {from, from_step};
    }
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < width; c++) buffer[i * columns + c] = to_float(from[i * from_step + c]);
        for (int64_t c = width; c < columns; c++) buffer[i * columns + c] = 0;
    }
    return {buffer, columns};
}

}  // namespace

extern "C" {

// Queries and keys of all sentences. Row strides are in elements; the heads of a row are contiguous.
struct Shape {
    const int32_t *query_offsets, *key_offsets;
    int64_t sentences, heads, width, tokens;
    int64_t q_stride, kv_stride, grad_q_stride, grad_kv_stride;
    int64_t causal, threads;
};

}

namespace {

// One head of one sentence.
struct Task {
    int64_t queries, keys, q0, k0, head;
    int64_t width, columns, key_columns, block;
    float scale;
    bool causal;

    Task(const Shape& shape, int64_t sentence, int64_t head)
        : queries(shape.query_offsets[sentence + 1] - shape.query_offsets[sentence]),
          keys(shape.key_offsets[sentence + 1] - shape.key_offsets[sentence]),
          q0(shape.query_offsets[sentence]),
          k0(shape.key_offsets[sentence]),
          head(head),
          width(shape.width),
          columns(padded(shape.width)),
          key_columns(padded(keys)),
          // Small blocks of rows skip most of the scores that a causal mask hides.
          block(shape.causal ? 16 : 64),
          scale(1 / std::sqrt(float(shape.width))),
          causal(shape.causal) {
        if (block > queries) block = queries;
    }

    // Keys that row `query` sees.
    int64_t seen(int64_t query) const { return causal && query + 1 < keys ? query + 1 : keys; }

    // Rows of a block of queries from `first` on.
    int64_t rows(int64_t first) const { return queries - first < block ? queries - first : block; }
};

template <typename T>
void attend_head(const Shape& shape, const T* q, const T* k, const T* v, T* out, float* sums, const Task& task) {
    const int64_t inner = shape.heads * task.width, at = task.head * task.width;
    const int64_t columns = task.columns, key_columns = task.key_columns, block = task.block;
    q += task.q0 * shape.q_stride + at;
    k += task.k0 * shape.kv_stride + at;
    v += task.k0 * shape.kv_stride + at;
    out += task.q0 * inner + at;
    sums += task.head * shape.tokens + task.q0;
    Buffers buffers(columns * (key_columns + task.keys + 2 * block) + block * key_columns);
    float* keys_KX = buffers.take(columns * key_columns);
    const Rows values_XK = rows_of(v, shape.kv_stride, task.keys, task.width, buffers.take(task.keys * columns));
    float* q_buffer = buffers.take(block * columns);
    float* out_QK = buffers.take(block * columns);
    float* p_QX = buffers.take(block * key_columns);
    copy_transposed(k, shape.kv_stride, task.keys, task.width, keys_KX, key_columns);
    for (int64_t first = 0; first < task.queries; first += block) {
        const int64_t rows = task.rows(first), seen = task.seen(first + rows - 1), wide = padded(seen);
        const Rows q_QK = rows_of(q + first * shape.q_stride, shape.q_stride, rows, task.width, q_buffer);
        multiply(rows, wide, task.width, q_QK.data, q_QK.step, 1, keys_KX, key_columns, p_QX, key_columns);
        for (int64_t i = 0; i < rows; i++) {
            float* row = p_QX + i * key_columns;
            const int64_t own = task.seen(first + i);
            if (own == 0) {
                // A dummy sentence may have no keys.
                sums[first + i] = 0;
                continue;
            }
            const float highest = largest(row, own) * task.scale;
            const float sum = exponentials(row, own, wide, task.scale, highest), share = 1 / sum;
            for (int64_t j = 0; j < own; j++) row[j] *= share;
            sums[first + i] = highest + std::log(sum);
        }
        multiply(rows, columns, seen, p_QX, key_columns, 1, values_XK.data, values_XK.step, out_QK, columns);
        write_rows(out_QK, columns, rows, task.width, out + first * inner, inner);
    }
}

template <typename T>
void return_head(const Shape& shape, const T* q, const T* k, const T* v, const float* sums, const T* grad_out,
                 T* grad_q, T* grad_k, T* grad_v, const Task& task) {
    const int64_t inner = shape.heads * task.width, at = task.head * task.width;
    const int64_t columns = task.columns, key_columns = task.key_columns, block = task.block;
    q += task.q0 * shape.q_stride + at;
    k += task.k0 * shape.kv_stride + at;
    v += task.k0 * shape.kv_stride + at;
    grad_out += task.q0 * inner + at;
    sums += task.head * shape.tokens + task.q0;
    grad_q += task.q0 * shape.grad_q_stride + at;
    grad_k += task.k0 * shape.grad_kv_stride + at;
    grad_v += task.k0 * shape.grad_kv_stride + at;
    Buffers buffers(columns * (2 * key_columns + 3 * task.keys + 3 * block) + 2 * block * key_columns);
    float* keys_KX = buffers.take(columns * key_columns);
    float* values_KX = buffers.take(columns * key_columns);
    const Rows keys_XK = rows_of(k, shape.kv_stride, task.keys, task.width, buffers.take(task.keys * columns));
    float* grad_keys_XK = buffers.take_zeros(task.keys * columns);
    float* grad_values_XK = buffers.take_zeros(task.keys * columns);
    float* q_buffer = buffers.take(block * columns);
    float* g_buffer = buffers.take(block * columns);
    float* grad_q_QK = buffers.take(block * columns);
    float* p_QX = buffers.take(block * key_columns);
    float* ds_QX = buffers.take(block * key_columns);
    copy_transposed(k, shape.kv_stride, task.keys, task.width, keys_KX, key_columns);
    copy_transposed(v, shape.kv_stride, task.keys, task.width, values_KX, key_columns);
    for (int64_t first = 0; first < task.queries; first += block) {
        const int64_t rows = task.rows(first), seen = task.seen(first + rows - 1), wide = padded(seen);
        const Rows q_QK = rows_of(q + first * shape.q_stride, shape.q_stride, rows, task.width, q_buffer);
        const Rows g_QK = rows_of(grad_out + first * inner, inner, rows, task.width, g_buffer);
        multiply(rows, wide, task.width, q_QK.data, q_QK.step, 1, keys_KX, key_columns, p_QX, key_columns);
        multiply(rows, wide, task.width, g_QK.data, g_QK.step, 1, values_KX, key_columns, ds_QX, key_columns);
        for (int64_t i = 0; i < rows; i++) {
            float *p = p_QX + i * key_columns, *ds = ds_QX + i * key_columns;
            exponentials(p, task.seen(first + i), wide, task.scale, sums[first + i]);
            const float mean = dot(p, ds, seen);
            for (int64_t j = 0; j < seen; j++) ds[j] = p[j] * (ds[j] - mean) * task.scale;
        }
        multiply(rows, columns, seen, ds_QX, key_columns, 1, keys_XK.data, keys_XK.step, grad_q_QK, columns);
        write_rows(grad_q_QK, columns, rows, task.width, grad_q + first * shape.grad_q_stride, shape.grad_q_stride);
        multiply(seen, columns, rows, ds_QX, 1, key_columns, q_QK.data, q_QK.step, grad_keys_XK, columns, true);
        multiply(seen, columns, rows, p_QX, 1, key_columns, g_QK.data, g_QK.step, grad_values_XK, columns, true);
    }
    write_rows(grad_keys_XK, columns, task.keys, task.width, grad_k, shape.grad_kv_stride);
    write_rows(grad_values_XK, columns, task.keys, task.width, grad_v, shape.grad_kv_stride);
}

template <typename T>
void attend(const Shape& shape, const T* q, const T* k, const T* v, T* out, float* sums) {
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t sentence = 0; sentence < shape.sentences; sentence++)
        for (int64_t head = 0; head < shape.heads; head++)
            attend_head(shape, q, k, v, out, sums, Task(shape, sentence, head));
}

template <typename T>
void give_back(const Shape& shape, const T* q, const T* k, const T* v, const float* sums, const T* grad_out, T* grad_q, T* grad_k, T* grad_v) {
#pragma omp parallel for collapse(2) schedule(dynamic, 4) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t sentence = 0; sentence < shape.sentences; sentence++)
        for (int64_t head = 0; head < shape.heads; head++)
            return_head(shape, q, k, v, sums, grad_out, grad_q, grad_k, grad_v, Task(shape, sentence, head));
}

// One position of every hypothesis. Strides are in elements; the numbers of an entry are contiguous.
struct Beams {
    int64_t sentences, beam, heads, width, entries;
    int64_t q_sentence, q_hypothesis, q_head, kv_sentence, kv_head, kv_entry;
    // The stride of hypotheses is 0 where all of a sentence see the same entries.
    int64_t mask_sentence, mask_hypothesis;
    int64_t threads;
};

// Sum of the products of a row in fp32 and one of any type.
template <typename T>
float dot_mixed(const float* a, const T* b, int64_t count) {
    Floats sums = {};
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) sums += *reinterpret_cast<const Floats*>(a + j) * load(b + j);
    float sum = sum_of(sums);
    for (; j < count; j++) sum += a[j] * to_float(b[j]);
    return sum;
}

// The sum of the seen entries' values by weight, for V vectors of columns.
template <int V, typename T>
void mix(const float* p_row, const int32_t* seen, int64_t count, const T* v, int64_t step, float share, T* out) {
    Floats sums[V] = {};
    for (int64_t i = 0; i < count; i++)
        for (int part = 0; part < V; part++) sums[part] += p_row[i] * load(v + seen[i] * step + part * LANES);
    for (int part = 0; part < V; part++)
        for (int l = 0; l < LANES; l++) assign(out[part * LANES + l], sums[part][l] * share);
}

// One head of one hypothesis: `seen` lists the entries that it sees.
template <typename T>
void attend_hypothesis(const T* q, const T* k, const T* v, const Beams& shape, const int32_t* seen, int64_t count,
                       float* q_row, float* p_row, T* out) {
    if (count == 0) {
        for (int64_t c = 0; c < shape.width; c++) assign(out[c], 0.0f);
        return;
    }
    const float scale = 1 / std::sqrt(float(shape.width));
    for (int64_t c = 0; c < shape.width; c++) q_row[c] = to_float(q[c]) * scale;
    const int64_t line = 64 / sizeof(T);
    for (int64_t i = 0; i < count; i++) {
        // The values are read next.
        for (int64_t c = 0; c < shape.width; c += line) __builtin_prefetch(v + seen[i] * shape.kv_entry + c);
        p_row[i] = dot_mixed(q_row, k + seen[i] * shape.kv_entry, shape.width);
    }
    const float sum = exponentials(p_row, count, count, 1, largest(p_row, count)), share = 1 / sum;
    int64_t c = 0;
    for (; c + 4 * LANES <= shape.width; c += 4 * LANES) mix<4>(p_row, seen, count, v + c, shape.kv_entry, share, out + c);
    for (; c + LANES <= shape.width; c += LANES) mix<1>(p_row, seen, count, v + c, shape.kv_entry, share, out + c);
    for (; c < shape.width; c++) {
        float mixed = 0;
        for (int64_t i = 0; i < count; i++) mixed += p_row[i] * to_float(v[seen[i] * shape.kv_entry + c]);
        assign(out[c], mixed * share);
    }
}

template <typename T>
void attend_beams(const Beams& shape, const T* q, const T* k, const T* v, const T* mask, T* out) {
#pragma omp parallel for schedule(dynamic, 4) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t sentence = 0; sentence < shape.sentences; sentence++) {
        thread_local std::vector<int32_t> seen;
        thread_local std::vector<int64_t> counts;
        seen.resize(shape.beam * shape.entries);
        counts.assign(shape.beam, 0);
        // The entries are found once for all heads.
        for (int64_t place = 0; place < shape.beam; place++) {
            const T* row = mask + sentence * shape.mask_sentence + place * shape.mask_hypothesis;
            int32_t* list = seen.data() + place * shape.entries;
            int64_t count = 0;
            for (int64_t entry = 0; entry < shape.entries; entry++) {
                list[count] = int32_t(entry);
                count += to_float(row[entry]) == 0;
            }
            counts[place] = count;
        }
        Buffers buffers(padded(shape.width) + padded(shape.entries));
        float *q_row = buffers.take(padded(shape.width)), *p_row = buffers.take(padded(shape.entries));
        for (int64_t head = 0; head < shape.heads; head++) {
            const int64_t at = sentence * shape.kv_sentence + head * shape.kv_head;
            for (int64_t place = 0; place < shape.beam; place++)
                attend_hypothesis(
                    q + sentence * shape.q_sentence + place * shape.q_hypothesis + head * shape.q_head, k + at, v + at,
                    shape, seen.data() + place * shape.entries, counts[place], q_row, p_row,
                    out + ((sentence * shape.beam + place) * shape.heads + head) * shape.width);
        }
    }
}

// A hash of 32 bits in which each input bit changes each output bit with a probability of 0.5 (C. Wellons, "Prospecting
// for Hash Functions", 2018).
uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// One residual connection: rows of x + scale * y, where y is dropped at random, are normalised.
struct Residual {
    int64_t rows, width;
    // Rows whose gradients of gain and bias are added up together: the result does not depend on the number of threads.
    int64_t block;
    // Elements with lower random bits are dropped.
    int64_t lowest_kept;
    float scale, epsilon;
    int64_t threads;
};

// The numbers of a row to add up: its sum is taken in lanes, which are added at the end.
template <typename F>
float add_up(int64_t width, F number) {
    float lanes[WIDTH] = {};
    int64_t c = 0;
    for (; c + WIDTH <= width; c += WIDTH)
        for (int l = 0; l < WIDTH; l++) lanes[l] += number(c + l);
    for (int l = 0; c + l < width; l++) lanes[l] += number(c + l);
    float sum = 0;
    for (int l = 0; l < WIDTH; l++) sum += lanes[l];
    return sum;
}

// A row of x + scale * y; all of y is kept if there are no random bits.
template <typename T>
void add_kept(const Residual& shape, const T* x, const T* y, const int16_t* bits, float* sum) {
    const float scale = shape.scale;
    const int32_t lowest = int32_t(shape.lowest_kept);
    if (bits == nullptr)
        for (int64_t c = 0; c < shape.width; c++) sum[c] = to_float(x[c]) + to_float(y[c]);
    else
        for (int64_t c = 0; c < shape.width; c++)
            sum[c] = to_float(x[c]) + (bits[c] >= lowest ? scale * to_float(y[c]) : 0.0f);
}

template <typename T>
void add_and_normalise(const Residual& shape, const T* x, const T* y, const int16_t* bits, const T* gain, const T* bias,
                       T* out, float* means, float* factors) {
    const int64_t width = shape.width;
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t row = 0; row < shape.rows; row++) {
        const int64_t at = row * width;
        Buffers buffers(width);
        float* sum = buffers.take(width);
        add_kept(shape, x + at, y + at, bits == nullptr ? bits : bits + at, sum);
        const float mean = add_up(width, [&](int64_t c) { return sum[c]; }) / width;
        const float square = add_up(width, [&](int64_t c) { return (sum[c] - mean) * (sum[c] - mean); }) / width;
        const float factor = 1 / std::sqrt(square + shape.epsilon);
        for (int64_t c = 0; c < width; c++)
            assign(out[at + c], (sum[c] - mean) * factor * to_float(gain[c]) + to_float(bias[c]));
        means[row] = mean;
        factors[row] = factor;
    }
}

// With n the normalised sum, g = dz * gain and <> the mean of a row:
//     d(sum) = (g - <g> - n <g n>) / deviation    dx = d(sum)    dy = scale * d(sum) where kept
// `n` holds the sum when this begins. The gradients of gain and bias are added to those of earlier rows.
template <typename T>
void return_row(const Residual& shape, const int16_t* bits, const T* __restrict gain, float mean, float factor,
                const T* __restrict up, T* __restrict grad_x, T* __restrict grad_y, float* __restrict n,
                float* __restrict g, float* __restrict grad_gain, float* __restrict grad_bias) {
    const int64_t width = shape.width;
    const int32_t lowest = int32_t(shape.lowest_kept);
    const float scale = shape.scale;
    for (int64_t c = 0; c < width; c++) n[c] = (n[c] - mean) * factor;
    for (int64_t c = 0; c < width; c++) g[c] = to_float(up[c]);
    for (int64_t c = 0; c < width; c++) grad_gain[c] += g[c] * n[c];
    for (int64_t c = 0; c < width; c++) grad_bias[c] += g[c];
    for (int64_t c = 0; c < width; c++) g[c] *= to_float(gain[c]);
    const float mean_g = add_up(width, [&](int64_t c) { return g[c]; }) / width;
    const float mean_gn = add_up(width, [&](int64_t c) { return g[c] * n[c]; }) / width;
    for (int64_t c = 0; c < width; c++) g[c] = (g[c] - mean_g - n[c] * mean_gn) * factor;
    for (int64_t c = 0; c < width; c++) assign(grad_x[c], g[c]);
    if (bits != nullptr)
        for (int64_t c = 0; c < width; c++) assign(grad_y[c], bits[c] >= lowest ? g[c] * scale : 0.0f);
}

// `grad_y` is not written if nothing is dropped, as it then equals `grad_x`.
template <typename T>
void return_normalised(const Residual& shape, const T* x, const T* y, const int16_t* bits, const T* gain,
                       const float* means, const float* factors, const T* grad_out, T* grad_x, T* grad_y,
                       float* grad_gain, float* grad_bias) {
    const int64_t width = shape.width, blocks = (shape.rows + shape.block - 1) / shape.block;
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * shape.block;
        const int64_t after = first + shape.block < shape.rows ? first + shape.block : shape.rows;
        float *of_gain = grad_gain + block * width, *of_bias = grad_bias + block * width;
        std::memset(of_gain, 0, width * sizeof(float));
        std::memset(of_bias, 0, width * sizeof(float));
        Buffers buffers(2 * width);
        float *n = buffers.take(width), *g = buffers.take(width);
        for (int64_t row = first; row < after; row++) {
            const int64_t at = row * width;
            const int16_t* of_row = bits == nullptr ? bits : bits + at;
            add_kept(shape, x + at, y + at, of_row, n);
            return_row(shape, of_row, gain, means[row], factors[row], grad_out + at, grad_x + at, grad_y + at, n, g,
                       of_gain, of_bias);
        }
    }
}

struct Sums {
    // Rows that are added up together: the result does not depend on the number of threads.
    int64_t rows, width, block, threads;
};

// Sums of a gradient's rows, one per block. With the output of a ReLU, the gradient is first set to zero where that is.
template <typename T>
void return_bias(const Sums& shape, const T* gradient, const T* relu, T* returned, float* sums) {
    const int64_t rows = shape.rows, width = shape.width, block = shape.block;
    const int64_t blocks = (rows + block - 1) / block;
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t after = (i + 1) * block < rows ? (i + 1) * block : rows;
        float* __restrict sum = sums + i * width;
        std::memset(sum, 0, width * sizeof(float));
        for (int64_t row = i * block; row < after; row++) {
            const T* __restrict g = gradient + row * width;
            if (relu == nullptr) {
                for (int64_t c = 0; c < width; c++) sum[c] += to_float(g[c]);
                continue;
            }
            const T* __restrict z = relu + row * width;
            T* __restrict out = returned + row * width;
            // "Not at most zero", because the gradient of NaN must be seen.
            for (int64_t c = 0; c < width; c++) {
                const float kept = to_float(z[c]) <= 0 ? 0.0f : to_float(g[c]);
                assign(out[c], kept);
                sum[c] += kept;
            }
        }
    }
}

// Rows and columns of a tile of a matrix that is transposed. A tile's column is one line of the cache.
constexpr int64_t TILE_HEIGHT = 32, TILE_WIDTH = 64, SQUARE = 8;

typedef uint16_t Halves __attribute__((vector_size(SQUARE * 2), aligned(2), may_alias));

// Alternates the elements of two vectors: their first halves, or with `second` their last ones.
template <bool second>
Halves alternate(Halves a, Halves b) {
    constexpr int first = second ? SQUARE / 2 : 0;
#if defined(__clang__)
    return __builtin_shufflevector(a, b, first, first + 8, first + 1, first + 9, first + 2, first + 10, first + 3,
                                   first + 11);
#else
    const Halves places = {first, first + 8, first + 1, first + 9, first + 2, first + 10, first + 3, first + 11};
    return __builtin_shuffle(a, b, places);
#endif
}

// Transposes a square: each round rotates the bits of an element's place (row, column) by one, and three swap the two.
void transpose_square(const BFloat16* from, int64_t from_step, BFloat16* to, int64_t to_step) {
    Halves rows[SQUARE], mixed[SQUARE];
    for (int64_t i = 0; i < SQUARE; i++) rows[i] = *reinterpret_cast<const Halves*>(from + i * from_step);
    for (int round = 0; round < 3; round++) {
        for (int64_t i = 0; i < SQUARE / 2; i++) {
            mixed[2 * i] = alternate<false>(rows[i], rows[i + SQUARE / 2]);
            mixed[2 * i + 1] = alternate<true>(rows[i], rows[i + SQUARE / 2]);
        }
        for (int64_t i = 0; i < SQUARE; i++) rows[i] = mixed[i];
    }
    for (int64_t i = 0; i < SQUARE; i++) *reinterpret_cast<Halves*>(to + i * to_step) = rows[i];
}

void transpose_tile(const BFloat16* tile, int64_t height, int64_t width, BFloat16* to, int64_t to_step) {
    for (int64_t c = 0; c < width; c += SQUARE)
        for (int64_t r = 0; r < height; r += SQUARE) {
            if (r + SQUARE <= height && c + SQUARE <= width) {
                transpose_square(tile + r * TILE_WIDTH + c, TILE_WIDTH, to + c * to_step + r, to_step);
                continue;
            }
            for (int64_t j = c; j < c + SQUARE && j < width; j++)
                for (int64_t i = r; i < r + SQUARE && i < height; i++) to[j * to_step + i] = tile[i * TILE_WIDTH + j];
        }
}

// Transposes some rows of a matrix by way of a tile, because rows at a distance of a power of two share few places in
// the cache.
void transpose_rows(const BFloat16* from, int64_t height, int64_t width, BFloat16* to, int64_t to_step) {
    BFloat16 tile[TILE_HEIGHT * TILE_WIDTH];
    for (int64_t left = 0; left < width; left += TILE_WIDTH) {
        const int64_t wide = width - left < TILE_WIDTH ? width - left : TILE_WIDTH;
        for (int64_t r = 0; r < height; r++)
            std::memcpy(tile + r * TILE_WIDTH, from + r * width + left, wide * sizeof(BFloat16));
        transpose_tile(tile, height, wide, to + left * to_step, to_step);
    }
}

struct Matrix {
    int64_t rows, width, threads;
};

void transpose(const Matrix& shape, const BFloat16* from, BFloat16* to) {
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t top = 0; top < shape.rows; top += TILE_HEIGHT) {
        const int64_t height = shape.rows - top < TILE_HEIGHT ? shape.rows - top : TILE_HEIGHT;
        transpose_rows(from + top * shape.width, height, shape.width, to + top, shape.rows);
    }
}

// Rows as integers times a scale each, so that the largest magnitude of a row becomes 127. A row without finite numbers
// has a scale of NaN or infinity, and so has all that is computed with it.
template <typename T>
void quantise(const Matrix& shape, const T* x, int8_t* integers, float* scales) {
    const int64_t width = shape.width;
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t row = 0; row < shape.rows; row++) {
        const T* from = x + row * width;
        int8_t* to = integers + row * width;
        // Magnitudes are ordered as their bits are, NaN last.
        int32_t most_bits = 0;
        for (int64_t c = 0; c < width; c++) {
            const float number = to_float(from[c]);
            int32_t bits;
            std::memcpy(&bits, &number, 4);
            bits &= 0x7fffffff;
            most_bits = bits > most_bits ? bits : most_bits;
        }
        float most;
        std::memcpy(&most, &most_bits, 4);
        scales[row] = most / 127;
        // Smaller numbers have no finite inverse.
        if (!std::isfinite(most) || most < 1e-30f) {
            std::memset(to, 0, width);
            continue;
        }
        const float inverse = 127 / most;
        for (int64_t c = 0; c < width; c++) to[c] = int8_t(std::rint(to_float(from[c]) * inverse));
    }
}

// Sums of products of integers, times the scales of their row and column, plus a bias unless it is null.
template <typename T>
void scale_sums(const Matrix& shape, const int32_t* sums, const float* row_scales, const float* column_scales,
                const T* bias, T* out) {
    const int64_t width = shape.width;
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t row = 0; row < shape.rows; row++) {
        const int32_t* from = sums + row * width;
        T* to = out + row * width;
        const float scale = row_scales[row];
        if (bias == nullptr)
            for (int64_t c = 0; c < width; c++) assign(to[c], float(from[c]) * scale * column_scales[c]);
        else
            for (int64_t c = 0; c < width; c++)
                assign(to[c], float(from[c]) * scale * column_scales[c] + to_float(bias[c]));
    }
}

// Arguments and results of the search for the best tokens. Each row has `count` places in `values` and `tokens`.
struct Best {
    const int64_t* never;
    int64_t never_count, end, count;
    float *values, *ends;
    int64_t* tokens;
};

// Inserts a token into the best so far, which are sorted, largest first. Equal values keep the order of their tokens,
// because tokens come in order and only a larger value moves another one.
void insert(float value, int64_t token, const Best& best, float* values, int64_t* tokens) {
    for (int64_t i = 0; i < best.never_count; i++)
        if (best.never[i] == token) return;
    int64_t place = best.count - 1;
    for (; place > 0 && value > values[place - 1]; place--) {
        values[place] = values[place - 1];
        tokens[place] = tokens[place - 1];
    }
    values[place] = value;
    tokens[place] = token;
}

void best_of_row(const float* row, int64_t vocabulary, const Best& best, float* values, int64_t* tokens, float& end) {
    constexpr int64_t BLOCK = 64;
    for (int64_t i = 0; i < best.count; i++) {
        values[i] = -INFINITY;
        tokens[i] = 0;
    }
    float highest = -INFINITY;
    for (int64_t first = 0; first < vocabulary; first += BLOCK) {
        const int64_t count = vocabulary - first < BLOCK ? vocabulary - first : BLOCK;
        const float of_block = largest(row + first, count);
        if (of_block > highest) highest = of_block;
        if (of_block > values[best.count - 1])
            for (int64_t j = first; j < first + count; j++)
                if (row[j] > values[best.count - 1]) insert(row[j], j, best, values, tokens);
    }
    Floats sums = {};
    int64_t j = 0;
    for (; j + LANES <= vocabulary; j += LANES)
        sums += exponential(*reinterpret_cast<const Floats*>(row + j) - highest);
    float sum = 0;
    for (int l = 0; l < LANES; l++) sum += sums[l];
    for (; j < vocabulary; j++) sum += std::exp(row[j] - highest);
    const float log_sum = highest + std::log(sum);
    for (int64_t i = 0; i < best.count; i++) values[i] -= log_sum;
    end = row[best.end] - log_sum;
}

template <typename T>
void best_of_rows(const T* logits, int64_t rows, int64_t vocabulary, const Best& best, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; i++) {
        const T* row = logits + i * vocabulary;
        Buffers buffers(vocabulary);
        const float* numbers;
        if constexpr (sizeof(T) == sizeof(float)) {
            numbers = row;
        } else {
            float* converted = buffers.take(vocabulary);
            for (int64_t j = 0; j < vocabulary; j++) converted[j] = to_float(row[j]);
            numbers = converted;
        }
        best_of_row(numbers, vocabulary, best, best.values + i * best.count, best.tokens + i * best.count, best.ends[i]);
    }
}

struct Softmax {
    // Elements from one row to the next.
    int64_t rows, row_step, vocabulary;
    // Whether the gradient replaces the logits.
    int64_t replace;
    float smoothing;
    int64_t threads;
};

// `totals` are the logarithms of sums of exp. Logits become p, and p - (1 - smoothing) at the label.
template <typename T>
void smoothed_softmax(const Softmax& shape, T* logits, const int64_t* labels, float* totals, float* picked) {
    const int64_t vocabulary = shape.vocabulary, whole = vocabulary / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(shape.threads) if (shape.threads > 1)
    for (int64_t i = 0; i < shape.rows; i++) {
        T* row = logits + i * shape.row_step;
        Buffers buffers(padded(vocabulary));
        float* p = buffers.take(padded(vocabulary));
        for (int64_t j = 0; j < vocabulary; j++) p[j] = to_float(row[j]);
        for (int64_t j = vocabulary; j < padded(vocabulary); j++) p[j] = -INFINITY;
        const float highest = largest(p, vocabulary);
        picked[i] = p[labels[i]];
        Floats sums = {};
        for (int64_t j = 0; j < padded(vocabulary); j += LANES) {
            Floats* place = reinterpret_cast<Floats*>(p + j);
            *place = exponential(*place - highest);
            if (j < whole) sums += *place;
        }
        float sum = sum_of(sums);
        for (int64_t j = whole; j < vocabulary; j++) sum += p[j];
        totals[i] = highest + std::log(sum);
        if (!shape.replace) continue;
        const float factor = 1 / sum;
        for (int64_t j = 0; j < vocabulary; j++) assign(row[j], p[j] * factor);
        assign(row[labels[i]], p[labels[i]] * factor - (1 - shape.smoothing));
    }
}

}  // namespace

extern "C" {

void attend_fp32(const Shape* shape, const float* q, const float* k, const float* v, float* out, float* sums) {
    attend(*shape, q, k, v, out, sums);
}

void attend_bf16(const Shape* shape, const BFloat16* q, const BFloat16* k, const BFloat16* v, BFloat16* out,
                 float* sums) {
    attend(*shape, q, k, v, out, sums);
}

void return_gradients_fp32(const Shape* shape, const float* q, const float* k, const float* v,
                           const float* sums, const float* grad_out, float* grad_q, float* grad_k, float* grad_v) {
    give_back(*shape, q, k, v, sums, grad_out, grad_q, grad_k, grad_v);
}

void return_gradients_bf16(const Shape* shape, const BFloat16* q, const BFloat16* k, const BFloat16* v,
                           const float* sums, const BFloat16* grad_out, BFloat16* grad_q,
                           BFloat16* grad_k, BFloat16* grad_v) {
    give_back(*shape, q, k, v, sums, grad_out, grad_q, grad_k, grad_v);
}

void attend_beams_fp32(const Beams* shape, const float* q, const float* k, const float* v, const float* mask,
                       float* out) {
    attend_beams(*shape, q, k, v, mask, out);
}

void attend_beams_bf16(const Beams* shape, const BFloat16* q, const BFloat16* k, const BFloat16* v,
                       const BFloat16* mask, BFloat16* out) {
    attend_beams(*shape, q, k, v, mask, out);
}

void add_and_normalise_fp32(const Residual* shape, const float* x, const float* y, const int16_t* bits,
                            const float* gain, const float* bias, float* out, float* means, float* factors) {
    add_and_normalise(*shape, x, y, bits, gain, bias, out, means, factors);
}

void add_and_normalise_bf16(const Residual* shape, const BFloat16* x, const BFloat16* y, const int16_t* bits,
                            const BFloat16* gain, const BFloat16* bias, BFloat16* out, float* means, float* factors) {
    add_and_normalise(*shape, x, y, bits, gain, bias, out, means, factors);
}

void return_normalised_fp32(const Residual* shape, const float* x, const float* y, const int16_t* bits,
                            const float* gain, const float* means, const float* factors, const float* grad_out,
                            float* grad_x, float* grad_y, float* grad_gain, float* grad_bias) {
    return_normalised(*shape, x, y, bits, gain, means, factors, grad_out, grad_x, grad_y, grad_gain, grad_bias);
}

void return_normalised_bf16(const Residual* shape, const BFloat16* x, const BFloat16* y, const int16_t* bits,
                            const BFloat16* gain, const float* means, const float* factors, const BFloat16* grad_out,
                            BFloat16* grad_x, BFloat16* grad_y, float* grad_gain, float* grad_bias) {
    return_normalised(*shape, x, y, bits, gain, means, factors, grad_out, grad_x, grad_y, grad_gain, grad_bias);
}

void return_bias_fp32(const Sums* shape, const float* gradient, const float* relu, float* returned, float* sums) {
    return_bias(*shape, gradient, relu, returned, sums);
}

void return_bias_bf16(const Sums* shape, const BFloat16* gradient, const BFloat16* relu, BFloat16* returned,
                      float* sums) {
    return_bias(*shape, gradient, relu, returned, sums);
}

void transpose_bf16(const Matrix* shape, const BFloat16* from, BFloat16* to) { transpose(*shape, from, to); }

void quantise_fp32(const Matrix* shape, const float* x, int8_t* integers, float* scales) {
    quantise(*shape, x, integers, scales);
}

void quantise_bf16(const Matrix* shape, const BFloat16* x, int8_t* integers, float* scales) {
    quantise(*shape, x, integers, scales);
}

void scale_sums_fp32(const Matrix* shape, float* out, const int32_t* sums, const float* row_scales,
                     const float* column_scales, const float* bias) {
    scale_sums(*shape, sums, row_scales, column_scales, bias, out);
}

void scale_sums_bf16(const Matrix* shape, BFloat16* out, const int32_t* sums, const float* row_scales,
                     const float* column_scales, const BFloat16* bias) {
    scale_sums(*shape, sums, row_scales, column_scales, bias, out);
}

void smoothed_softmax_fp32(const Softmax* shape, float* logits, const int64_t* labels, float* totals, float* picked) {
    smoothed_softmax(*shape, logits, labels, totals, picked);
}

void smoothed_softmax_bf16(const Softmax* shape, BFloat16* logits, const int64_t* labels, float* totals,
                           float* picked) {
    smoothed_softmax(*shape, logits, labels, totals, picked);
}

// Word i depends on i and the seed alone. The second hash keeps seeds apart that differ only in the order of words.
void random_words(uint64_t seed, int64_t count, uint32_t* words, int64_t threads) {
    const uint32_t low = uint32_t(seed), high = uint32_t(seed >> 32);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; i++) words[i] = mixed(mixed(uint32_t(i) ^ low) + high);
}

void best_tokens_fp32(const float* logits, int64_t rows, int64_t vocabulary, const Best* best, int64_t threads) {
    best_of_rows(logits, rows, vocabulary, *best, threads);
}

void best_tokens_bf16(const BFloat16* logits, int64_t rows, int64_t vocabulary, const Best* best, int64_t threads) {
    best_of_rows(logits, rows, vocabulary, *best, threads);
}

}
