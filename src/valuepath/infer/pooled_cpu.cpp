// Token-pooled attention for few queries on a CPU: see valuepath.infer.pooled_cpu, which compiles and calls this.
//
//   pool:    w = softmax(q k^T + mask) over S keys, in float32;  pooled[u] = sum of w[t] over the positions t with slot u
//   product: out = sum_u pooled[u] rows[u], in float32
//
// Keys and rows are float32 or bfloat16 and are read once; nothing of the size of the keys is written.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

struct bfloat16 {
  uint16_t bits;
};

inline float wide(float x) { return x; }

inline float wide(bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

inline void narrow(float x, float* y) { *y = x; }

inline void narrow(float x, bfloat16* y) {  // to the nearest, ties to even; NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  y->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

constexpr float kMasked = -std::numeric_limits<float>::infinity();

// e^x for x <= 0 to about one unit in the last place; 0 below the smallest normal number. Without a call, so that it is vectorised.
inline float exponential(float x) {
  const float n = std::rint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // x - n ln 2, with ln 2 in two parts
  float p = 1.9875691500e-4f;                                   // minimax polynomial of e^r for |r| <= ln 2 / 2
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float kept = x < -87.0f ? 0.0f : p;
  const int32_t power = (int32_t(std::max(n, -126.0f)) + 127) << 23;  // 2^n as bits
  float scale;
  std::memcpy(&scale, &power, sizeof scale);
  return kept * scale;
}

// Sixteen numbers at a time: vector types that GCC and Clang map to what the processor has.
typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

inline f32x16 load(const float* x) {
  f32x16 y;
  std::memcpy(&y, x, sizeof y);
  return y;
}

inline f32x16 load(const bfloat16* x) {
  u16x16 bits;
  std::memcpy(&bits, x, sizeof bits);
  const u32x16 shifted = __builtin_convertvector(bits, u32x16) << 16;
  f32x16 y;
  std::memcpy(&y, &shifted, sizeof y);
  return y;
}

inline f32x4 quarter(f32x16 x) {  // four partial sums
  f32x8 a[2];
  std::memcpy(a, &x, sizeof x);
  const f32x8 half = a[0] + a[1];
  f32x4 b[2];
  std::memcpy(b, &half, sizeof half);
  return b[0] + b[1];
}

inline float sum(f32x4 x) { return (x[0] + x[2]) + (x[1] + x[3]); }

constexpr int64_t kAhead = 4096;  // bytes that are asked for before they are needed; found by measuring

// Scores of `count` keys for one query. E is the head width if it is known at compile time, else 0.
template <class T, int E>
void dot(const T* keys, const float* query, float* out, int64_t count, int64_t width) {
  const int64_t e = E ? E : width, whole = e / 16 * 16;
  int64_t t = 0;
  if (E)
    for (; t + 4 <= count; t += 4) {
      f32x4 parts[4];
      for (int j = 0; j < 4; j++) {
        const T* k = keys + (t + j) * e;
        for (int64_t byte = 0; byte < E * int64_t(sizeof(T)); byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(k) + kAhead + byte);
        f32x16 acc = {};
        for (int64_t i = 0; i < E; i += 16) acc += load(k + i) * load(query + i);
        parts[j] = quarter(acc);
      }
      for (int j = 0; j < 4; j++) out[t + j] = sum(parts[j]);
    }
  for (; t < count; t++) {
    const T* k = keys + t * e;
    f32x16 acc = {};
    for (int64_t i = 0; i < whole; i += 16) acc += load(k + i) * load(query + i);
    float s = sum(quarter(acc));
    for (int64_t i = whole; i < e; i++) s += wide(k[i]) * query[i];
    out[t] = s;
  }
}

struct Sizes {
  int64_t B, g, R, Q, S, e, U;         // sequences, key heads, rows a key head (query heads x queries), queries, keys, width, slots
  int64_t key_batch, key_head;         // strides in elements; a head's keys lie one after another
  int64_t slot_batch;                  // stride of a sequence's slots
  int64_t mask_batch, mask_query, mask_key;
  int64_t threads;
};

constexpr int64_t kKeys = 512;  // keys at a time, so that several queries of one key head find them in the first cache

// One query's sums while its keys go by: weights relative to the largest score so far, and their total.
struct Running {
  float top = kMasked, total = 0;
};

// Scores of one block of keys for one query, masked.
template <class T>
void scores(const Sizes& n, const float* q, const T* k, const uint8_t* mask, int64_t at, int64_t start, int64_t count, float* s) {
  if (n.e == 64) dot<T, 64>(k, q, s, count, 64);
  else if (n.e == 128) dot<T, 128>(k, q, s, count, 128);
  else dot<T, 0>(k, q, s, count, n.e);
  if (mask) {
    const uint8_t* m = mask + at * n.mask_query + start * n.mask_key;
    for (int64_t t = 0; t < count; t++)
      if (!m[t * n.mask_key]) s[t] = kMasked;
  } else {  // causal: the last query is at the last key
    for (int64_t t = std::max<int64_t>(n.S - n.Q + at + 1 - start, 0); t < count; t++) s[t] = kMasked;
  }
}

// Adds a block's weights to their slots. When a larger score comes, which gets ever rarer, what is there is scaled down to it.
void add_up(float* s, const int32_t* slots, int64_t count, Running& running, float* pooled, int64_t U) {
  float top = running.top;
#pragma omp simd reduction(max : top)
  for (int64_t t = 0; t < count; t++) top = s[t] > top ? s[t] : top;
  if (top == kMasked) {  // nothing is visible yet, unless it is not a number, which a maximum does not see
    for (int64_t t = 0; t < count; t++)
      if (s[t] != s[t]) running.top = 0, running.total = pooled[slots[t]] = s[t];
    return;
  }
  if (top > running.top) {
    const float scale = running.top == kMasked ? 0.0f : exponential(running.top - top);
#pragma omp simd
    for (int64_t u = 0; u < U; u++) pooled[u] *= scale;
    running.total *= scale;
    running.top = top;
  }
  float part = 0;
#pragma omp simd reduction(+ : part)
  for (int64_t t = 0; t < count; t++) {
    s[t] = exponential(s[t] - top);
    part += s[t];
  }
  running.total += part;
  for (int64_t t = 0; t < count; t++) pooled[slots[t]] += s[t];
}

// One key head's keys `from` to `to`: weights relative to each query's largest score, added up in pooled (R, U).
template <class T>
void pass(const Sizes& n, const float* query, const T* keys, const int32_t* slots, const uint8_t* mask, int64_t from, int64_t to,
          Running* running, float* pooled) {
  float block[kKeys];
  for (int64_t start = from; start < to; start += kKeys) {
    const int64_t count = std::min(kKeys, to - start);
    for (int64_t row = 0; row < n.R; row++) {
      scores(n, query + row * n.e, keys + start * n.e, mask, row % n.Q, start, count, block);
      add_up(block, slots + start, count, running[row], pooled + row * n.U, n.U);
    }
  }
}

// query: (B, g, R, e) scaled; pooled: (B, g, R, U)
template <class T>
void pool(const Sizes& n, const float* query, const T* keys, const int32_t* slots, const uint8_t* mask, float* pooled) {
  const int64_t heads = n.B * n.g;
  // with fewer heads than threads can share evenly, the keys of a head are split too, each part with sums of its own
  const int64_t parts = heads >= 4 * n.threads || heads % n.threads == 0 ? 1 : std::max<int64_t>(1, std::min(2 * n.threads, n.S / 4096));
  const int64_t step = ((n.S + parts - 1) / parts + kKeys - 1) / kKeys * kKeys;
  std::vector<float> partial(parts == 1 ? 0 : heads * parts * n.R * n.U);
  std::vector<Running> running(heads * parts * n.R);
#pragma omp parallel for num_threads(n.threads) schedule(dynamic)
  for (int64_t task = 0; task < heads * parts; task++) {
    const int64_t head = task / parts, b = head / n.g, from = task % parts * step, to = std::min(from + step, n.S);
    float* sums = parts == 1 ? pooled + head * n.R * n.U : partial.data() + task * n.R * n.U;
    std::memset(sums, 0, n.R * n.U * sizeof(float));
    pass(n, query + head * n.R * n.e, keys + b * n.key_batch + head % n.g * n.key_head, slots + b * n.slot_batch,
         mask ? mask + b * n.mask_batch : nullptr, from, to, running.data() + task * n.R, sums);
  }
#pragma omp parallel for num_threads(n.threads) schedule(static)
  for (int64_t i = 0; i < heads * n.R; i++) {
    const int64_t head = i / n.R, row = i % n.R;
    float* sums = pooled + i * n.U;
    float top = kMasked, total = 0;
    for (int64_t part = 0; part < parts; part++) top = std::max(top, running[(head * parts + part) * n.R + row].top);
    for (int64_t part = 0; part < parts; part++) {
      const Running& one = running[(head * parts + part) * n.R + row];
      total += one.top == kMasked ? 0.0f : one.total * exponential(one.top - top);
    }
    for (int64_t part = 0; part < parts; part++) {
      const int64_t task = head * parts + part;
      const Running& one = running[task * n.R + row];
      // a query that sees nothing has no weight on anything
      const float scale = one.top == kMasked ? 0.0f : exponential(one.top - top) / total;
      const float* x = parts == 1 ? sums : partial.data() + (task * n.R + row) * n.U;
      if (part == 0)
#pragma omp simd
        for (int64_t u = 0; u < n.U; u++) sums[u] = x[u] * scale;
      else
#pragma omp simd
        for (int64_t u = 0; u < n.U; u++) sums[u] += x[u] * scale;
    }
  }
}

// out += pooled rows for a block of slots and two queries at once, whose sums stay in registers.
template <int E, int N>
void accumulate(const float* const* pooled, const float* rows, float* const* out, int64_t count) {
  f32x16 acc[N][E / 16];
  for (int j = 0; j < N; j++)
    for (int i = 0; i < E / 16; i++) acc[j][i] = load(out[j] + 16 * i);
  for (int64_t u = 0; u < count; u++)
    for (int j = 0; j < N; j++)
      for (int i = 0; i < E / 16; i++) acc[j][i] += pooled[j][u] * load(rows + u * E + 16 * i);
  for (int j = 0; j < N; j++) std::memcpy(out[j], acc[j], sizeof acc[j]);
}

void accumulate(const float* pooled, const float* rows, float* out, int64_t count, int64_t e) {
  for (int64_t u = 0; u < count; u++)
#pragma omp simd
    for (int64_t c = 0; c < e; c++) out[c] += pooled[u] * rows[u * e + c];
}

template <int E>
void accumulate_all(const std::vector<const float*>& pooled, const float* rows, const std::vector<float*>& out, int64_t count) {
  size_t i = 0;
  for (; i + 2 <= out.size(); i += 2) accumulate<E, 2>(&pooled[i], rows, &out[i], count);
  if (i < out.size()) accumulate<E, 1>(&pooled[i], rows, &out[i], count);
}

constexpr int64_t kRows = 64;  // rows at a time: widened once, then read from the first cache by every query

inline const float* widened(const float* rows, int64_t, float*) { return rows; }

inline const float* widened(const bfloat16* rows, int64_t count, float* buffer) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) buffer[i] = wide(rows[i]);
  return buffer;
}

// Adds the product of a head's sums with rows `from` to `to` to `sum`; `weight` is moved along.
template <class T>
void multiply(const T* rows, int64_t from, int64_t to, int64_t e, const std::vector<const float*>& pooled, const std::vector<float*>& sum) {
  thread_local std::vector<float> buffer;
  buffer.resize(kRows * e);
  std::vector<const float*> weight(pooled.size());
  for (int64_t u = from; u < to; u += kRows) {
    const int64_t count = std::min(kRows, to - u);
    const float* x = widened(rows + u * e, count * e, buffer.data());
    for (size_t i = 0; i < pooled.size(); i++) weight[i] = pooled[i] + u;
    if (e == 64) accumulate_all<64>(weight, x, sum, count);
    else if (e == 128) accumulate_all<128>(weight, x, sum, count);
    else
      for (size_t i = 0; i < sum.size(); i++) accumulate(weight[i], x, sum[i], count, e);
  }
}

// pooled: (B, g, R, U); rows: a head's lie one after another, (U, e); out: (B, g, R, e). Where there are fewer heads than threads
// the slots are split into parts, each with its own sum.
template <class T>
void product(int64_t B, int64_t g, int64_t R, int64_t U, int64_t e, int64_t row_head, int64_t threads, const float* pooled, const T* rows, float* out) {
  const int64_t parts = g % threads == 0 || g >= 4 * threads ? 1 : threads, step = (U + parts - 1) / parts, queries = B * R;
  std::vector<float> sums(g * parts * queries * e, 0.0f);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t task = 0; task < g * parts; task++) {
    const int64_t head = task / parts, to = std::min((task % parts + 1) * step, U);
    std::vector<float*> sum(queries);
    std::vector<const float*> weight(queries);
    for (int64_t i = 0; i < queries; i++) {
      sum[i] = sums.data() + (task * queries + i) * e;
      weight[i] = pooled + ((i / R * g + head) * R + i % R) * U;
    }
    multiply(rows + head * row_head, task % parts * step, to, e, weight, sum);
  }
  for (int64_t head = 0; head < g; head++)
    for (int64_t i = 0; i < queries; i++) {
      float* y = out + ((i / R * g + head) * R + i % R) * e;
      std::fill(y, y + e, 0.0f);
      for (int64_t part = 0; part < parts; part++) {
        const float* x = sums.data() + ((head * parts + part) * queries + i) * e;
        for (int64_t c = 0; c < e; c++) y[c] += x[c];
      }
    }
}

// Both at once, from and to the dtype of the keys. query: (B, h, Q, e) with any strides; out: (B, Q, h, e).
template <class T>
void attend(const Sizes& n, const T* query, int64_t query_batch, int64_t query_head, int64_t query_position, float scaling, const T* keys,
            const int32_t* slots, const uint8_t* mask, const T* rows, int64_t row_head, T* out) {
  const int64_t heads = n.B * n.g, group = n.R / n.Q, h = n.g * group;
  std::vector<float> wide_query(heads * n.R * n.e);
  for (int64_t i = 0; i < heads * n.R; i++) {
    const int64_t head = i / n.R % n.g * group + i % n.R / n.Q;
    const T* q = query + i / n.R / n.g * query_batch + head * query_head + i % n.Q * query_position;
    for (int64_t c = 0; c < n.e; c++) wide_query[i * n.e + c] = wide(q[c]) * scaling;
  }
  auto write = [&](int64_t head, int64_t row, const float* x) {
    T* y = out + ((head / n.g * n.Q + row % n.Q) * h + head % n.g * group + row / n.Q) * n.e;
    for (int64_t c = 0; c < n.e; c++) narrow(x[c], y + c);
  };
  // rows that stay in a core's own cache, or are read by one sequence only, are multiplied while the sums are there
  const bool at_once = (heads % n.threads == 0 || heads >= 4 * n.threads) && (n.B == 1 || n.U * n.e * int64_t(sizeof(T)) <= 1 << 18);
  if (!at_once) {
    std::vector<float> pooled(heads * n.R * n.U), sums(heads * n.R * n.e);
    pool(n, wide_query.data(), keys, slots, mask, pooled.data());
    product(n.B, n.g, n.R, n.U, n.e, row_head, n.threads, pooled.data(), rows, sums.data());
    for (int64_t i = 0; i < heads * n.R; i++) write(i / n.R, i % n.R, sums.data() + i * n.e);
    return;
  }
#pragma omp parallel for num_threads(n.threads) schedule(dynamic)
  for (int64_t head = 0; head < heads; head++) {
    thread_local std::vector<float> pooled, sums;
    pooled.assign(n.R * n.U, 0.0f);
    sums.assign(n.R * n.e, 0.0f);
    std::vector<Running> running(n.R);
    const int64_t b = head / n.g;
    pass(n, wide_query.data() + head * n.R * n.e, keys + b * n.key_batch + head % n.g * n.key_head, slots + b * n.slot_batch,
         mask ? mask + b * n.mask_batch : nullptr, 0, n.S, running.data(), pooled.data());
    std::vector<float*> sum(n.R);
    std::vector<const float*> weight(n.R);
    for (int64_t row = 0; row < n.R; row++) sum[row] = sums.data() + row * n.e, weight[row] = pooled.data() + row * n.U;
    multiply(rows + head % n.g * row_head, 0, n.U, n.e, weight, sum);
    for (int64_t row = 0; row < n.R; row++) {
      const float scale = running[row].top == kMasked ? 0.0f : 1.0f / running[row].total;
      for (int64_t c = 0; c < n.e; c++) sum[row][c] *= scale;
      write(head, row, sum[row]);
    }
  }
}

}  // namespace

extern "C" {

void valuepath_attend(int narrow, const int64_t* n, float scaling, const void* query, const void* keys, const int32_t* slots,
                      const uint8_t* mask, const void* rows, void* out) {
  const Sizes sizes = {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13]};
  if (narrow)
    attend(sizes, static_cast<const bfloat16*>(query), n[14], n[15], n[16], scaling, static_cast<const bfloat16*>(keys), slots, mask,
           static_cast<const bfloat16*>(rows), n[17], static_cast<bfloat16*>(out));
  else
    attend(sizes, static_cast<const float*>(query), n[14], n[15], n[16], scaling, static_cast<const float*>(keys), slots, mask,
           static_cast<const float*>(rows), n[17], static_cast<float*>(out));
}

void valuepath_pool(int narrow, const int64_t* n, const float* query, const void* keys, const int32_t* slots, const uint8_t* mask,
                    float* pooled) {
  const Sizes sizes = {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13]};
  if (narrow) pool(sizes, query, static_cast<const bfloat16*>(keys), slots, mask, pooled);
  else pool(sizes, query, static_cast<const float*>(keys), slots, mask, pooled);
}

void valuepath_product(int narrow, const int64_t* n, const float* pooled, const void* rows, float* out) {
  if (narrow) product(n[0], n[1], n[2], n[3], n[4], n[5], n[6], pooled, static_cast<const bfloat16*>(rows), out);
  else product(n[0], n[1], n[2], n[3], n[4], n[5], n[6], pooled, static_cast<const float*>(rows), out);
}

}  // extern "C"
