// A few rows through decoder layers of the Llama family, on a CPU: each weight is read once, all
// layers run in one parallel region, and nothing is allocated but one scratch buffer.
//
// Every number depends on its own row alone. A dot product runs over its columns in one order, and
// attention over the visible positions in theirs, whatever the number of rows, of threads or of
// slots that a row does not see. So a token's logits are the same bits in a forward of one row, in
// a block and in a tree.
//
// Letters: R rows, D width, H query heads, G key/value heads, d head width, I inner width, C slots
// of a cache. W is the type of weights and caches, S that of everything else.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#ifdef __FMA__
#include <immintrin.h>
#endif
#include <omp.h>

namespace {

#ifdef __AVX512F__
constexpr int BYTES = 64;
#else
constexpr int BYTES = 32;
#endif

// Compilers load an operand again for every product with it, and loads are what is short.
#if defined(__AVX__)
#define IN_REGISTER(vector) __asm__("" : "+v"(vector))
#else
#define IN_REGISTER(vector)
#endif

struct bf16 {
  uint16_t bits;
};

template <class W>
using Sum = std::conditional_t<std::is_same_v<W, double>, double, float>;

template <class S>
struct Lanes {
  static constexpr int n = BYTES / sizeof(S);
  typedef S type __attribute__((vector_size(BYTES), aligned(alignof(S)), may_alias));
};
template <class S>
using Vec = typename Lanes<S>::type;

// a * b + c. Said outright: left to itself, a compiler fuses the two in one loop and not in another,
// which rounds differently (hence -ffp-contract=off).
template <class V>
inline V multiply_add(V a, V b, V c) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<V, Vec<float>>) return _mm512_fmadd_ps(a, b, c);
  if constexpr (std::is_same_v<V, Vec<double>>) return _mm512_fmadd_pd(a, b, c);
#elif defined(__FMA__)
  if constexpr (std::is_same_v<V, Vec<float>>) return _mm256_fmadd_ps(a, b, c);
  if constexpr (std::is_same_v<V, Vec<double>>) return _mm256_fmadd_pd(a, b, c);
#endif
  return a * b + c;
}

template <class W>
inline Vec<Sum<W>> load(const W* from) {
  if constexpr (std::is_same_v<W, bf16>) {
    typedef uint16_t Half __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));
    typedef uint32_t Word __attribute__((vector_size(BYTES)));
    const Word bits = __builtin_convertvector(*reinterpret_cast<const Half*>(from), Word) << 16;
    return reinterpret_cast<const Vec<float>&>(bits);
  } else {
    return *reinterpret_cast<const Vec<W>*>(from);
  }
}

template <class S>
inline void store(S* to, Vec<S> from) {
  *reinterpret_cast<Vec<S>*>(to) = from;
}

template <class W>
inline Sum<W> value(W from) {
  if constexpr (std::is_same_v<W, bf16>) {
    const uint32_t bits = uint32_t(from.bits) << 16;
    float to;
    std::memcpy(&to, &bits, sizeof to);
    return to;
  } else {
    return from;
  }
}

template <class W>
inline W rounded(Sum<W> from) {
  if constexpr (std::is_same_v<W, bf16>) {
    uint32_t bits;
    std::memcpy(&bits, &from, sizeof bits);
    if (from != from) return {0x7fc0};
    return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to nearest, ties to even
  } else {
    return from;
  }
}

// The sum of all lanes, by halves: eight as ((0+4)+(2+6)) + ((1+5)+(3+7)).
template <class S>
inline S total(Vec<S> v) {
  constexpr int n = Lanes<S>::n;
  if constexpr (n == 16)
    v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  if constexpr (n == 16)
    v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 15);
  if constexpr (n == 8) v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  return (v[0] + v[2]) + (v[1] + v[3]);
}

// exp(x): Cephes' polynomial of degree 5 on [-ln 2 / 2, ln 2 / 2], to about one ulp in float32.
inline Vec<float> exponential(Vec<float> x) {
  using F = Vec<float>;
  typedef int32_t Int __attribute__((vector_size(BYTES)));
  const Vec<float> low = Vec<float>{} - 87.3f, high = Vec<float>{} + 88.3f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Vec<float> magic = Vec<float>{} + 12582912.0f;  // 1.5 * 2^23: what is added is rounded
  const Vec<float> shifted = x * 1.44269504f + magic;
  const Vec<float> n = shifted - magic;
  const Vec<float> r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = multiply_add<F>(p, r, F{} + 8.3334519073e-3f);
  p = multiply_add<F>(p, r, F{} + 4.1665795894e-2f);
  p = multiply_add<F>(p, r, F{} + 1.6666665459e-1f);
  p = multiply_add<F>(p, r, F{} + 5.0000001201e-1f);
  p = p * r * r + r + 1.0f;
  Int exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent = (exponent - 0x4b400000 + 127) << 23;
  Vec<float> scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  return p * scale;
}

inline Vec<double> exponential(Vec<double> x) {
  for (int i = 0; i < Lanes<double>::n; i++) x[i] = std::exp(x[i]);
  return x;
}

// The first n lanes of memory, the others as in `rest`.
template <class S>
inline Vec<S> some(const S* from, long n, Vec<S> rest) {
  std::memcpy(&rest, from, n * sizeof(S));
  return rest;
}

// ---------------------------------------------------------------- products of few rows

template <class W>
struct Matrix {
  const W* weight;  // [out, in]
  const W* bias;    // [out] or null
  long out, in;
};

// Weights that will be read next, fetched while others are multiplied: in each step `count` cache
// lines, `stride` bytes apart.
struct Ahead {
  const char* from;  // null: nothing
  long count, stride, step;
};

// OB rows of the matrix times RB rows of x.
template <int OB, int RB, bool ADD, class W, class S = Sum<W>>
inline void tile(const W* weight, const W* bias, long in, const S* x, long x_stride, S* y,
                 long y_stride, Ahead ahead) {
  constexpr int n = Lanes<S>::n;
  Vec<S> sums[OB][RB];
  for (int o = 0; o < OB; o++)
    for (int r = 0; r < RB; r++) sums[o][r] = Vec<S>{};
  long k = 0;
  for (; k + n <= in; k += n) {
    Vec<S> w[OB];
#pragma GCC unroll 8
    for (int o = 0; o < OB; o++) w[o] = load(weight + o * in + k);
    if (ahead.from) {
      for (long i = 0; i < ahead.count; i++) __builtin_prefetch(ahead.from + i * ahead.stride);
      ahead.from += ahead.step;
    }
#pragma GCC unroll 8
    for (int r = 0; r < RB; r++) {
      Vec<S> each = load(x + r * x_stride + k);
      IN_REGISTER(each);
#pragma GCC unroll 8
      for (int o = 0; o < OB; o++) sums[o][r] = multiply_add<Vec<S>>(w[o], each, sums[o][r]);
    }
  }
  for (int o = 0; o < OB; o++) {
    for (int r = 0; r < RB; r++) {
      S sum = total<S>(sums[o][r]);
      for (long j = k; j < in; j++) sum += value(weight[o * in + j]) * x[r * x_stride + j];
      if (bias) sum += value(bias[o]);
      S& to = y[r * y_stride + o];
      to = ADD ? to + sum : sum;
    }
  }
}

// OB rows of the matrix times all rows of x, RB at a time. The rows of the matrix after them are
// fetched meanwhile: by themselves where x is one tile high, evenly over all tiles otherwise.
template <int OB, int RB, bool ADD, class W, class S = Sum<W>>
inline void strip(const Matrix<W>& m, long o, const S* x, long x_stride, long rows, S* y,
                  long y_stride, bool more) {
  constexpr long LINE = 64, step = Lanes<S>::n * sizeof(W);
  const W* weight = m.weight + o * m.in;
  const W* bias = m.bias ? m.bias + o : nullptr;
  const long n_tiles = (rows + RB - 1) / RB, bytes = OB * step / n_tiles;
  Ahead ahead{nullptr, OB, m.in * long(sizeof(W)), step};
  if (n_tiles > 1) ahead = {nullptr, (bytes + LINE - 1) / LINE, LINE, bytes};
  if (more) ahead.from = reinterpret_cast<const char*>(weight + OB * m.in);
  long r = 0;
  for (; r + RB <= rows; r += RB) {
    tile<OB, RB, ADD>(weight, bias, m.in, x + r * x_stride, x_stride, y + r * y_stride + o,
                      y_stride, ahead);
    if (more) ahead.from += m.in / Lanes<S>::n * ahead.step;
  }
  x += r * x_stride, y += r * y_stride + o;
  if constexpr (RB > 3)
    if (rows - r == 3) tile<OB, 3, ADD>(weight, bias, m.in, x, x_stride, y, y_stride, ahead);
  if constexpr (RB > 2)
    if (rows - r == 2) tile<OB, 2, ADD>(weight, bias, m.in, x, x_stride, y, y_stride, ahead);
  if constexpr (RB > 1)
    if (rows - r == 1) tile<OB, 1, ADD>(weight, bias, m.in, x, x_stride, y, y_stride, ahead);
}

template <int OB, int RB, bool ADD, class W, class S = Sum<W>>
void strips(const Matrix<W>& m, long begin, long end, const S* x, long x_stride, long rows, S* y,
            long y_stride) {
  long o = begin;
  for (; o + OB <= end; o += OB)
    strip<OB, RB, ADD>(m, o, x, x_stride, rows, y, y_stride, o + 2 * OB <= end);
  for (; o < end; o++) strip<1, RB, ADD>(m, o, x, x_stride, rows, y, y_stride, false);
}

// Outputs begin..end of x [rows, in] times the matrix; sixteen vector registers hold the sums.
template <bool ADD, class W, class S = Sum<W>>
void product(const Matrix<W>& m, long begin, long end, const S* x, long x_stride, long rows, S* y,
             long y_stride) {
  if (rows == 1)
    strips<8, 1, ADD>(m, begin, end, x, x_stride, rows, y, y_stride);
  else if (rows == 2)
    strips<4, 2, ADD>(m, begin, end, x, x_stride, rows, y, y_stride);
  else
    strips<3, 4, ADD>(m, begin, end, x, x_stride, rows, y, y_stride);
}

// ---------------------------------------------------------------- what lies between products

template <class W, class S = Sum<W>>
void rms_norm(const S* x, const W* weight, double eps, long width, S* to) {
  constexpr int n = Lanes<S>::n;
  Vec<S> squares{};
  long i = 0;
  for (; i + n <= width; i += n) squares += load(x + i) * load(x + i);
  S sum = total<S>(squares);
  for (; i < width; i++) sum += x[i] * x[i];
  const S scale = 1 / std::sqrt(sum / width + S(eps));
  for (i = 0; i < width; i++) to[i] = x[i] * scale * value(weight[i]);
}

template <class W, class S = Sum<W>>
void rotate(S* x, const S* cos, const S* sin, long d) {
  const long half = d / 2;
  for (long i = 0; i < half; i++) {
    const S a = x[i], b = x[i + half];
    x[i] = a * cos[i] - b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

template <class S>
void silu_times(S* gate, const S* up, long size) {
  constexpr int n = Lanes<S>::n;
  auto silu = [](Vec<S> g) { return g / (exponential(-g) + S(1)); };
  long i = 0;
  for (; i + n <= size; i += n) store(gate + i, silu(load(gate + i)) * load(up + i));
  if (const long rest = size - i) {
    const Vec<S> to = silu(some(gate + i, rest, Vec<S>{})) * some(up + i, rest, Vec<S>{});
    std::memcpy(gate + i, &to, rest * sizeof(S));
  }
}

// Dot products of q with N keys that lie anywhere.
template <int N, class W, class S = Sum<W>>
inline void dots(const S* q, const W* const* keys, long d, S scale, S* to) {
  constexpr int n = Lanes<S>::n;
  Vec<S> sums[N];
  for (int j = 0; j < N; j++) sums[j] = Vec<S>{};
  long i = 0;
  for (; i + n <= d; i += n) {
    const Vec<S> each = load(q + i);
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) sums[j] = multiply_add<Vec<S>>(each, load(keys[j] + i), sums[j]);
  }
  for (int j = 0; j < N; j++) {
    S sum = total<S>(sums[j]);
    for (long t = i; t < d; t++) sum += q[t] * value(keys[j][t]);
    to[j] = sum * scale;
  }
}

// Which slots of the cache a row sees: those before `prefix`, and then the listed ones.
struct Sight {
  long prefix, n_listed;
  const long* listed;
  long size() const { return prefix + n_listed; }
  long slot(long j) const { return j < prefix ? j : listed[j - prefix]; }
};

// Attention of one query; `scores` has room for all that it sees and a vector more.
template <class W, class S = Sum<W>>
void attend(const S* q, const W* keys, const W* values, const Sight& sight, long d, S scale,
            S* scores, S* to) {
  constexpr int n = Lanes<S>::n;
  const long size = sight.size();
  long j = 0;
  for (; j + 4 <= size; j += 4) {
    const W* four[4];
    for (int i = 0; i < 4; i++) four[i] = keys + sight.slot(j + i) * d;
    dots<4>(q, four, d, scale, scores + j);
  }
  for (; j < size; j++) {
    const W* one = keys + sight.slot(j) * d;
    dots<1>(q, &one, d, scale, scores + j);
  }
  const S most = *std::max_element(scores, scores + size);
  Vec<S> sums{};
  for (j = size; j % n; j++) scores[j] = -INFINITY;  // to a whole vector: their exp is lost in rounding
  for (j = 0; j < size; j += n) {
    const Vec<S> each = exponential(load(scores + j) - most);
    store(scores + j, each);
    sums += each;
  }
  const S inverse = 1 / total<S>(sums);
  constexpr int MOST = 8;  // vectors of the output at once
  long i = 0;
  for (; i + n <= d; i += MOST * n) {
    const int m = int(std::min<long>(MOST, (d - i) / n));
    Vec<S> out[MOST];
    for (int v = 0; v < MOST; v++) out[v] = Vec<S>{};
    auto add = [&](const W* row, S weight) {
      const Vec<S> lanes = Vec<S>{} + weight;
      if (m == MOST) {
#pragma GCC unroll 8
        for (int v = 0; v < MOST; v++)
          out[v] = multiply_add<Vec<S>>(load(row + v * n), lanes, out[v]);
      } else {
        for (int v = 0; v < m; v++) out[v] = multiply_add<Vec<S>>(load(row + v * n), lanes, out[v]);
      }
    };
    for (j = 0; j < size; j++) add(values + sight.slot(j) * d + i, scores[j]);
    for (int v = 0; v < m; v++) {
      store(to + i + v * n, out[v] * inverse);
    }
    if (m < MOST) {
      i += m * n;
      break;
    }
  }
  for (; i < d; i++) {
    S out = 0;
    for (j = 0; j < size; j++) out += value(values[sight.slot(j) * d + i]) * scores[j];
    to[i] = out * inverse;
  }
}

}  // namespace

// ---------------------------------------------------------------- keyed sampling

typedef uint32_t Words __attribute__((vector_size(BYTES)));
typedef int32_t Ints __attribute__((vector_size(BYTES)));

// The finaliser of decoding/sampling.py, where 32-bit words live in int64.
template <class T>
inline T mix(T x) {
  x = x ^ (x >> 16);
  x = x * 0x21F0AAADu;
  x = x ^ (x >> 15);
  x = x * 0x735A2D97u;
  return x ^ (x >> 15);
}

template <class T>
inline T noise_bits(T token, uint32_t row) {
  return mix(mix(mix(token ^ 0x9E3779B9u) ^ row) + row);
}

// Gumbel noise as the sampler defines it: in float64, rounded once.
inline float gumbel(uint32_t bits) {
  return float(-std::log(-std::log((double(bits) + 0.5) * 0x1p-32)));
}

// ln(x) of positive normal numbers: Cephes' polynomial, to some ulp.
inline Vec<float> logarithm(Vec<float> x) {
  using F = Vec<float>;
  Ints bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits -= 0x3f3504f3;  // the mantissa to sqrt(1/2)..sqrt(2)
  const Vec<float> e = __builtin_convertvector(bits >> 23, Vec<float>);
  bits = (bits & 0x007fffff) + 0x3f3504f3;
  Vec<float> m;
  std::memcpy(&m, &bits, sizeof m);
  m -= 1.0f;
  Vec<float> p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = multiply_add<F>(p, m, F{} + 1.1676998740e-1f);
  p = multiply_add<F>(p, m, F{} - 1.2420140846e-1f);
  p = multiply_add<F>(p, m, F{} + 1.4249322787e-1f);
  p = multiply_add<F>(p, m, F{} - 1.6668057665e-1f);
  p = multiply_add<F>(p, m, F{} + 2.0000714765e-1f);
  p = multiply_add<F>(p, m, F{} - 2.4999993993e-1f);
  p = multiply_add<F>(p, m, F{} + 3.3333331174e-1f);
  return p * m * m * m - m * m * 0.5f + m + e * 0.69314718f;
}

// Noise to within 0.01, but for the last 2^18 words, whose noise it gives as infinite.
inline Vec<float> about_gumbel(Words bits) {
  const Ints top = (Ints)(bits >> 8);
  const Vec<float> uniform = (__builtin_convertvector(top, Vec<float>) + 0.5f) * 0x1p-24f;
  const Vec<float> to = -logarithm(-logarithm(uniform));
  const Vec<float> infinite = Vec<float>{} + INFINITY;
  return top >= (1 << 24) - (1 << 10) ? infinite : to;
}

// The best of logit + temperature * noise over one row, ties to the lowest token; -1 where a logit
// or the best is not finite. Most tokens are ruled out by a cheap bound on their noise.
template <class S>
int64_t choose_row(const S* logits, long vocab, uint32_t row, double temperature, float* bounds) {
  constexpr int n = Lanes<float>::n;
  constexpr float MARGIN = 0.02f;  // twice what the cheap noise can be off
  const float t = float(temperature);
  auto exact = [&](long v) {
    return logits[v] + S(t * gumbel(noise_bits(uint32_t(v), row)));
  };
  Vec<float> most = Vec<float>{} - INFINITY, wrong{};
  Words token;
  for (int i = 0; i < n; i++) token[i] = i;
  for (long v = 0; v < vocab; v += n, token += uint32_t(n)) {
    Vec<float> logit = Vec<float>{} - INFINITY;
    const long rest = std::min<long>(n, vocab - v);
    if constexpr (std::is_same_v<S, float>) {
      logit = rest == n ? load(logits + v) : some(logits + v, rest, logit);
    } else {
      for (long i = 0; i < rest; i++) logit[i] = float(logits[v + i]);
    }
    wrong += logit < INFINITY ? Vec<float>{} : Vec<float>{} + 1.0f;
    const Vec<float> noise = about_gumbel(noise_bits(token, row));
    const Vec<float> bound = logit + t * noise;
    const Vec<float> finite = noise < INFINITY ? bound : Vec<float>{} - INFINITY;
    most = most > finite ? most : finite;
    store(bounds + v, bound);
  }
  if (total<float>(wrong) > 0) return -1;
  float highest = most[0];
  for (int i = 1; i < n; i++) highest = std::max(highest, most[i]);
  const float enough = highest - t * MARGIN - std::fabs(highest) * 1e-5f - 1e-6f;
  long best = -1;
  S best_score = 0;
  for (long v = 0; v < vocab; v++) {
    if (!(bounds[v] >= enough)) continue;
    const S score = exact(v);
    if (best < 0 || score > best_score) best = v, best_score = score;
  }
  return std::isfinite(best_score) ? best : -1;
}

template <class S>
void choose(const S* logits, long rows, long vocab, const int64_t* key, const int64_t* positions,
            double temperature, int64_t* tokens) {
#pragma omp parallel
  {
    std::unique_ptr<float[]> bounds(new float[vocab + Lanes<float>::n]);
#pragma omp for schedule(static, 1)
    for (long r = 0; r < rows; r++) {
      const uint32_t row = mix(mix(uint32_t(positions[r]) ^ uint32_t(key[0])) ^ uint32_t(key[1]));
      tokens[r] = choose_row(logits + r * vocab, vocab, row, temperature, bounds.get());
    }
  }
}

// ---------------------------------------------------------------- what Python calls

extern "C" {

struct Shape {
  int64_t width, inner, heads, kv_heads, head_dim;
  int64_t attention_in;  // columns of the query, key and value matrices
  double eps, scale;     // of the norms, of attention's scores
};

struct Layer {
  const void *input_norm, *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm,
      *post_norm, *gate, *up, *down;
};

struct Rows {
  int64_t n;           // R
  void* x;             // [R, D] in and out: embeddings, then the last layer's output
  const void* attends; // [R, attention_in]: what the first layer's projections read, or null
  const void *cos, *sin;  // [R, d]
  void* slab;          // [layers, 2, G, C, d] keys and values
  int64_t capacity;    // C
  int64_t start;       // slot of the first row
  int64_t sight;       // 0: a row sees all slots up to its own; 1: all up to the last row's; 2: tree
  int64_t base;        // of a tree: slots that all rows see
  const int64_t* parents;  // of a tree: slot `base + i` has the parent `base + parents[i]`, or < 0
  void* features;      // [R, n_features * D] outputs of some layers, or null
  int64_t n_features;
  const int64_t* feature_layers;
};

struct Head {
  const void *norm, *weight, *bias;
  int64_t vocab, n;  // n: how many of the last rows
  void *hidden, *logits;  // [n, D], [n, V] or null
};
}

namespace {

struct Share {
  long begin, end;
};
inline Share share(long size) {
  const long n = omp_get_num_threads(), t = omp_get_thread_num();
  return {size * t / n, size * (t + 1) / n};
}

// Keys and values of rows x [R, attention_in] go to the cache; queries too where there are any.
template <class W, class S = Sum<W>>
void project(const Shape& s, const Layer& layer, const S* x, const Rows& rows, W* keys, W* values,
             S* q, S* kv) {
  const long d = s.head_dim, q_width = s.heads * d, kv_width = s.kv_heads * d, in = s.attention_in;
  auto matrix = [&](const void* w, const void* b, long out) {
    return Matrix<W>{static_cast<const W*>(w), static_cast<const W*>(b), out, in};
  };
  auto run = [&](const Matrix<W>& m, S* to, long stride) {
    const Share part = share(m.out);
    product<false>(m, part.begin, part.end, x, in, rows.n, to, stride);
  };
  if (q) run(matrix(layer.q, layer.q_bias, q_width), q, q_width);
  run(matrix(layer.k, layer.k_bias, kv_width), kv, 2 * kv_width);
  run(matrix(layer.v, layer.v_bias, kv_width), kv + kv_width, 2 * kv_width);
#pragma omp barrier
  const S* cos = static_cast<const S*>(rows.cos);
  const S* sin = static_cast<const S*>(rows.sin);
  const long n_q = q ? s.heads : 0, units = n_q + s.kv_heads;
  const Share part = share(rows.n * units);
  for (long unit = part.begin; unit < part.end; unit++) {
    const long r = unit / units, h = unit % units;
    if (h < n_q) {
      S* each = q + r * q_width + h * d;
      if (layer.q_norm) rms_norm(each, static_cast<const W*>(layer.q_norm), s.eps, d, each);
      rotate<W>(each, cos + r * d, sin + r * d, d);
      continue;
    }
    const long g = h - n_q, at = (g * rows.capacity + rows.start + r) * d;
    S* each = kv + r * 2 * kv_width + g * d;
    if (layer.k_norm) rms_norm(each, static_cast<const W*>(layer.k_norm), s.eps, d, each);
    rotate<W>(each, cos + r * d, sin + r * d, d);
    for (long i = 0; i < d; i++) keys[at + i] = rounded<W>(each[i]);
    for (long i = 0; i < d; i++) values[at + i] = rounded<W>(each[kv_width + i]);
  }
#pragma omp barrier
}

template <class W, class S = Sum<W>>
void run_layers(const Shape& s, const Layer* layers, long n_layers, const Rows& rows,
                const Head* head) {
  const long R = rows.n, D = s.width, I = s.inner, d = s.head_dim, C = rows.capacity;
  const long q_width = s.heads * d, kv_width = s.kv_heads * d, in = s.attention_in;
  const long seen = std::max<long>(C, 1) + Lanes<S>::n, n_threads = omp_get_max_threads();
  const long per_row = std::max(D, in) + 2 * q_width + 2 * kv_width + 2 * I;
  std::unique_ptr<S[]> scratch(new S[R * per_row + n_threads * seen]);
  std::unique_ptr<long[]> listed(new long[n_threads * seen]);
  S* h = scratch.get();
  S* q = h + R * std::max(D, in);
  S* kv = q + R * q_width;
  S* attended = kv + R * 2 * kv_width;
  S* gate = attended + R * q_width;
  S* up = gate + R * I;
  S* all_scores = up + R * I;
  S* x = static_cast<S*>(rows.x);
  W* slab = static_cast<W*>(rows.slab);
  auto norm = [&](const void* weight, long from, S* to) {
    const Share part = share(R - from);
    for (long r = part.begin; r < part.end; r++)
      rms_norm(x + (from + r) * D, static_cast<const W*>(weight), s.eps, D, to + r * D);
  };
  auto run = [&](auto add, const void* w, const void* b, long out, long columns, const S* from,
                 S* to) {
    const Matrix<W> m{static_cast<const W*>(w), static_cast<const W*>(b), out, columns};
    const Share part = share(out);
    product<decltype(add)::value>(m, part.begin, part.end, from, columns, R, to, out);
    return part;
  };
  const std::true_type add;
  const std::false_type set;
#pragma omp parallel
  {
    S* scores = all_scores + omp_get_thread_num() * seen;
    long* path = listed.get() + omp_get_thread_num() * seen;
    for (long l = 0; l < n_layers; l++) {
      const Layer& layer = layers[l];
      W* keys = slab + l * 2 * s.kv_heads * C * d;
      W* values = keys + s.kv_heads * C * d;
      const S* attends = h;
      if (l == 0 && rows.attends) {
        attends = static_cast<const S*>(rows.attends);
      } else {
        norm(layer.input_norm, 0, h);
      }
#pragma omp barrier
      project<W>(s, layer, attends, rows, keys, values, q, kv);
      const Share part = share(R * s.heads);
      long of_row = -1;
      Sight sight{};
      for (long unit = part.begin; unit < part.end; unit++) {
        const long r = unit / s.heads, head_ = unit % s.heads;
        if (r != of_row) {
          of_row = r;
          sight = {rows.start + (rows.sight == 0 ? r + 1 : R), 0, path};
          if (rows.sight == 2) {
            sight.prefix = rows.base;
            for (long node = rows.start - rows.base + r; node >= 0; node = rows.parents[node])
              path[sight.n_listed++] = rows.base + node;
            std::reverse(path, path + sight.n_listed);
          }
        }
        const long at = head_ / (s.heads / s.kv_heads) * C * d;
        attend(q + r * q_width + head_ * d, keys + at, values + at, sight, d, S(s.scale), scores,
               attended + r * q_width + head_ * d);
      }
#pragma omp barrier
      run(add, layer.o, layer.o_bias, D, q_width, attended, x);
#pragma omp barrier
      norm(layer.post_norm, 0, h);
#pragma omp barrier
      run(set, layer.gate, nullptr, I, D, h, gate);
      const Share own = run(set, layer.up, nullptr, I, D, h, up);
      for (long r = 0; r < R; r++)
        silu_times(gate + r * I + own.begin, up + r * I + own.begin, own.end - own.begin);
#pragma omp barrier
      const Share out = run(add, layer.down, nullptr, D, I, gate, x);
      for (long f = 0; f < rows.n_features; f++)
        if (rows.feature_layers[f] == l)
          for (long r = 0; r < R; r++)
            std::copy(x + r * D + out.begin, x + r * D + out.end,
                      static_cast<S*>(rows.features) + (r * rows.n_features + f) * D + out.begin);
#pragma omp barrier
    }
    if (head->n) {
      S* hidden = static_cast<S*>(head->hidden);
      norm(head->norm, R - head->n, hidden);
#pragma omp barrier
      if (head->logits) {
        const Matrix<W> m{static_cast<const W*>(head->weight), static_cast<const W*>(head->bias),
                          head->vocab, D};
        const Share part = share(head->vocab);
        product<false>(m, part.begin, part.end, hidden, D, head->n, static_cast<S*>(head->logits),
                       head->vocab);
      }
    }
  }
}

template <class W, class S = Sum<W>>
void extend(const Shape& s, const Layer* layers, long n_layers, const Rows& rows) {
  const long kv_width = s.kv_heads * s.head_dim, half = s.kv_heads * rows.capacity * s.head_dim;
  std::unique_ptr<S[]> kv(new S[rows.n * 2 * kv_width]);
#pragma omp parallel
  for (long l = 0; l < n_layers; l++) {
    W* keys = static_cast<W*>(rows.slab) + l * 2 * half;
    project<W>(s, layers[l], static_cast<const S*>(rows.attends), rows, keys, keys + half,
               static_cast<S*>(nullptr), kv.get());
  }
}

template <class W, class S = Sum<W>>
void linear(const Matrix<W>& m, const S* x, long rows, S* y) {
#pragma omp parallel
  {
    const Share part = share(m.out);
    product<false>(m, part.begin, part.end, x, m.in, rows, y, m.out);
  }
}

// Calls `work` with a null pointer of the type of the weights: 0 float32, 1 bfloat16, 2 float64.
template <class Work>
void with_type(int64_t type, Work work) {
  if (type == 0) work(static_cast<float*>(nullptr));
  if (type == 1) work(static_cast<bf16*>(nullptr));
  if (type == 2) work(static_cast<double*>(nullptr));
}

}  // namespace

extern "C" {

void run_layers(int64_t type, const Shape* shape, const Layer* layers, int64_t n_layers,
                const Rows* rows, const Head* head) {
  with_type(type, [&](auto* of) {
    using W = std::remove_pointer_t<decltype(of)>;
    run_layers<W>(*shape, layers, n_layers, *rows, head);
  });
}

void extend(int64_t type, const Shape* shape, const Layer* layers, int64_t n_layers,
            const Rows* rows) {
  with_type(type, [&](auto* of) {
    using W = std::remove_pointer_t<decltype(of)>;
    extend<W>(*shape, layers, n_layers, *rows);
  });
}

void linear(int64_t type, const void* weight, const void* bias, int64_t out, int64_t in,
            const void* x, int64_t rows, void* y) {
  with_type(type, [&](auto* of) {
    using W = std::remove_pointer_t<decltype(of)>;
    const Matrix<W> m{static_cast<const W*>(weight), static_cast<const W*>(bias), out, in};
    linear<W>(m, static_cast<const Sum<W>*>(x), rows, static_cast<Sum<W>*>(y));
  });
}

// Tokens [rows] of logits [rows, V], float32 for type 0 and float64 for type 2.
void choose(int64_t type, const void* logits, int64_t rows, int64_t vocab, const int64_t* key,
            const int64_t* positions, double temperature, int64_t* tokens) {
  if (type == 0)
    choose(static_cast<const float*>(logits), rows, vocab, key, positions, temperature, tokens);
  if (type == 2)
    choose(static_cast<const double*>(logits), rows, vocab, key, positions, temperature, tokens);
}
}
