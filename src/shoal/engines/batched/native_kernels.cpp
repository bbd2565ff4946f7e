// Convolution and max-pooling of small images, forward and backward, and products with a small matrix, on one core.
//
// Images have their channels last: x[n][row][column][channel], filters w[out][row][column][channel].
// A convolution is a register-blocked loop: several neighbouring outputs times one to four vectors of channels are kept
// in registers while the loop runs over the patch that they are computed from. A row of a patch (filter columns times
// channels) is contiguous in memory, so that the innermost loop is one loop of `row_length` steps.
//
// Built on first use by native_library.py; native_ops.py says where these operations take the place of torch's.

#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX512VL__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, REGISTERS = 32;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, REGISTERS = 16;
#else
constexpr int VECTOR_BYTES = 16, REGISTERS = 16;
#endif

namespace {

using at::Tensor;

// ---- vectors of L numbers, with loads and stores that may be partial and need no alignment

template <class T, int L>
struct Vector {
  typedef T Type __attribute__((vector_size(sizeof(T) * L)));
};
template <class T, int L>
using Lanes = typename Vector<T, L>::Type;

template <class T, int L>
inline Lanes<T, L> load(const T* from) {
  Lanes<T, L> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <class T, int L>
inline void store(T* to, Lanes<T, L> v) {
  std::memcpy(to, &v, sizeof v);
}

// The sum of a vector's numbers, added by halves.
template <class T, int L>
inline T sum_lanes(Lanes<T, L> v) {
  if constexpr (L == 2) {
    return v[0] + v[1];
  } else {
    Lanes<T, L / 2> halves[2];
    std::memcpy(halves, &v, sizeof v);
    return sum_lanes<T, L / 2>(halves[0] + halves[1]);
  }
}

// The first `count` numbers of a vector, 1 to L of them; what lies behind them in memory is neither read nor written.
template <class T, int L>
struct Some {
#if defined(__AVX512VL__)
  typename std::conditional<L == 16, __mmask16, __mmask8>::type mask;
  explicit Some(int64_t count) : mask(count >= L ? ~0u : (1u << count) - 1) {}
  inline Lanes<T, L> load(const T* from) const {
    if constexpr (sizeof(T) * L == 64 && sizeof(T) == 4) return (Lanes<T, L>)_mm512_maskz_loadu_ps(mask, from);
    else if constexpr (sizeof(T) * L == 64) return (Lanes<T, L>)_mm512_maskz_loadu_pd(mask, from);
    else if constexpr (sizeof(T) == 4) return (Lanes<T, L>)_mm256_maskz_loadu_ps(mask, from);
    else return (Lanes<T, L>)_mm256_maskz_loadu_pd(mask, from);
  }
  inline void store(T* to, Lanes<T, L> v) const {
    if constexpr (sizeof(T) * L == 64 && sizeof(T) == 4) _mm512_mask_storeu_ps(to, mask, (__m512)v);
    else if constexpr (sizeof(T) * L == 64) _mm512_mask_storeu_pd(to, mask, (__m512d)v);
    else if constexpr (sizeof(T) == 4) _mm256_mask_storeu_ps(to, mask, (__m256)v);
    else _mm256_mask_storeu_pd(to, mask, (__m256d)v);
  }
#else
  int64_t count;
  explicit Some(int64_t count) : count(std::min<int64_t>(count, L)) {}
  inline Lanes<T, L> load(const T* from) const {
    Lanes<T, L> v{};
    if (count == L)
      std::memcpy(&v, from, sizeof v);
    else
      for (int64_t i = 0; i < count; i++) v[i] = from[i];
    return v;
  }
  inline void store(T* to, Lanes<T, L> v) const {
    if (count == L)
      std::memcpy(to, &v, sizeof v);
    else
      for (int64_t i = 0; i < count; i++) to[i] = v[i];
  }
#endif
};

// Memory for `count` numbers on a cache line, kept for the next call; `slot` tells apart what is used at the same time.
template <class T>
T* scratch(int slot, size_t count) {
  static thread_local std::vector<T> kept[2];
  constexpr size_t line = 64 / sizeof(T);
  if (kept[slot].size() < count + line) kept[slot].resize(count + line);
  const auto address = reinterpret_cast<uintptr_t>(kept[slot].data());
  return reinterpret_cast<T*>((address + 63) / 64 * 64);
}
enum { PACKED_FILTERS, PADDED_IMAGES };

// ---- sizes of one convolution

struct Shape {
  int64_t images, rows, columns, channels;      // of the input, padding included
  int64_t out_rows, out_columns, out_channels;  // of the output
  int64_t filter_rows, filter_columns, stride_rows, stride_columns;

  int64_t row_length() const { return filter_columns * channels; }  // numbers in one row of a patch
  int64_t step() const { return stride_columns * channels; }        // numbers between the patches of two neighbours
  int64_t input_row(int64_t image, int64_t row) const { return (image * rows + row) * columns * channels; }
  int64_t output_row(int64_t image, int64_t row) const { return (image * out_rows + row) * out_columns * out_channels; }
};

// ---- forward: y = x * w + b

// P neighbouring outputs, V vectors of their channels; `packed` is [filter row][place in a patch row][V vectors].
template <class T, int L, int V, int P>
__attribute__((noinline)) void convolve_block(const T* x, const T* packed, const T* bias, const Shape& s, T* y, Some<T, L> end) {
  const int64_t length = s.row_length(), step = s.step(), row_step = s.columns * s.channels;
  Lanes<T, L> sums[P][V];
#pragma GCC unroll 16
  for (int p = 0; p < P; p++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[p][v] = load<T, L>(bias + L * v);
  for (int64_t row = 0; row < s.filter_rows; row++, x += row_step)
    for (int64_t q = 0; q < length; q++, packed += V * L) {
      Lanes<T, L> weights[V];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) weights[v] = load<T, L>(packed + L * v);
#pragma GCC unroll 16
      for (int p = 0; p < P; p++) {
        const T value = x[p * step + q];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) sums[p][v] += weights[v] * value;
      }
    }
#pragma GCC unroll 16
  for (int p = 0; p < P; p++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      T* to = y + p * s.out_channels + L * v;
      v == V - 1 ? end.store(to, sums[p][v]) : store<T, L>(to, sums[p][v]);
    }
}

template <class T, int L, int V, int P>
void convolve_rows(const T* x, const T* packed, const T* bias, const Shape& s, T* y, Some<T, L> end) {
  for (int64_t n = 0; n < s.images; n++)
    for (int64_t row = 0; row < s.out_rows; row++)
      for (int64_t column = 0; column < s.out_columns; column += P) {
        const int64_t first = std::min(column, s.out_columns - P);  // the last block may compute some outputs again
        convolve_block<T, L, V, P>(x + s.input_row(n, row * s.stride_rows) + first * s.step(), packed, bias, s,
                                         y + s.output_row(n, row) + first * s.out_channels, end);
      }
}

// Calls `call(std::integral_constant<int, P>)` with the largest listed P that is at most `most`.
template <int P, int... Rest, class Call>
void with_block(int64_t most, Call call) {
  if constexpr (sizeof...(Rest) == 0)
    call(std::integral_constant<int, P>());
  else if (P <= most)
    call(std::integral_constant<int, P>());
  else
    with_block<Rest...>(most, call);
}

// Calls `call(std::integral_constant<int, length>)`, for a length of at most P.
template <int P, class Call>
void with_exact_block(int64_t length, Call call) {
  if constexpr (P == 1)
    call(std::integral_constant<int, 1>());
  else if (length == P)
    call(std::integral_constant<int, P>());
  else
    with_exact_block<P - 1>(length, call);
}

// How many blocks a line of `length` takes decides which block is best: 14 for 28, 10 for 10, 5 for 15.
template <int MOST>
int64_t pick_block(int64_t length) {
  int64_t blocks = (length + MOST - 1) / MOST;
  return (length + blocks - 1) / blocks;
}

template <class T, int L, int V>
void convolve_channels(const T* x, const T* w, const T* b, const Shape& s, T* y, int64_t first) {
  const int64_t length = s.row_length(), count = std::min<int64_t>(V * L, s.out_channels - first);
  T* packed = scratch<T>(PACKED_FILTERS, (s.filter_rows * length + 1) * V * L);
  T* bias = packed + s.filter_rows * length * V * L;
  if (count < V * L) std::fill(packed, bias + V * L, T(0));
  for (int64_t o = 0; o < count; o++) {
    const T* from = w + (first + o) * s.filter_rows * length;
    for (int64_t q = 0; q < s.filter_rows * length; q++) packed[q * V * L + o] = from[q];
    bias[o] = b ? b[first + o] : 0;
  }
  constexpr int MOST = (REGISTERS - 2 - V) / V > 14 ? 14 : (REGISTERS - 2 - V) / V;
  with_block<14, 10, 8, 7, 6, 5, 4, 2, 1>(std::min<int64_t>(MOST, pick_block<MOST>(s.out_columns)), [&](auto p) {
    constexpr int P = decltype(p)::value;
    if constexpr (P <= MOST)
      convolve_rows<T, L, V, P>(x, packed, bias, s, y + first, Some<T, L>(count - L * (V - 1)));
  });
}

// Calls `call(first, L, V)` for blocks of V vectors of L numbers that cover `count` channels, few of them wasted.
template <class T, class Call>
void for_channel_blocks(int64_t count, Call call) {
  constexpr int L = VECTOR_BYTES / sizeof(T);
  std::integral_constant<int, 1> one;
  std::integral_constant<int, 2> two;
  std::integral_constant<int, 4> four;
  int64_t first = 0;
  while (first < count) {
    const int64_t left = count - first;
    if (L >= 8 && left <= L / 2) {
      call(first, std::integral_constant<int, L >= 8 ? L / 2 : L>(), one);
      first += L / 2;
    } else if (left <= L) {
      call(first, std::integral_constant<int, L>(), one);
      first += L;
    } else if (left <= 3 * L || REGISTERS < 32) {
      call(first, std::integral_constant<int, L>(), two);
      first += 2 * L;
    } else {
      call(first, std::integral_constant<int, L>(), four);
      first += 4 * L;
    }
  }
}

template <class T>
void convolve(const T* x, const T* w, const T* b, const Shape& s, T* y) {
  for_channel_blocks<T>(s.out_channels, [&](int64_t first, auto l, auto v) {
    convolve_channels<T, decltype(l)::value, decltype(v)::value>(x, w, b, s, y, first);
  });
}

// ---- gradient of the filters and of the bias

// For Q neighbouring places in one row of the patches; `gw` is where the first of them lies in the first filter.
template <class T, int L, int V, int Q>
__attribute__((noinline)) void filter_gradient_block(const T* x, const T* g, const Shape& s, int64_t count, T* gw) {
  const Some<T, L> end(count - L * (V - 1));
  Lanes<T, L> sums[Q][V] = {};
  for (int64_t n = 0; n < s.images; n++)
    for (int64_t row = 0; row < s.out_rows; row++) {
      const T* from = x + s.input_row(n, row * s.stride_rows);
      const T* by = g + s.output_row(n, row);
      for (int64_t column = 0; column < s.out_columns; column++, from += s.step(), by += s.out_channels) {
        Lanes<T, L> slopes[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) slopes[v] = v == V - 1 ? end.load(by + L * v) : load<T, L>(by + L * v);
#pragma GCC unroll 16
        for (int q = 0; q < Q; q++) {
          const T value = from[q];
#pragma GCC unroll 4
          for (int v = 0; v < V; v++) sums[q][v] += slopes[v] * value;
        }
      }
    }
  T spread[Q][V * L];
#pragma GCC unroll 16
  for (int q = 0; q < Q; q++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store<T, L>(&spread[q][L * v], sums[q][v]);
  const int64_t filter = s.filter_rows * s.row_length();
  for (int64_t o = 0; o < count; o++)
    for (int q = 0; q < Q; q++) gw[o * filter + q] = spread[q][o];
}

// The sum over all positions, by four sums each, so that no addition waits for the one before.
template <class T, int L, int V>
void sum_channels(const T* g, const Shape& s, Some<T, L> end, T* gb) {
  Lanes<T, L> sums[4][V] = {};
  for (int64_t i = 0; i < s.images * s.out_rows * s.out_columns; i++)
    for (int v = 0; v < V; v++) {
      const T* from = g + i * s.out_channels + L * v;
      sums[i % 4][v] += v == V - 1 ? end.load(from) : load<T, L>(from);
    }
  for (int v = 0; v < V; v++) {
    const Lanes<T, L> total = (sums[0][v] + sums[1][v]) + (sums[2][v] + sums[3][v]);
    v == V - 1 ? end.store(gb + L * v, total) : store<T, L>(gb + L * v, total);
  }
}

template <class T, int L, int V>
void filter_gradient_channels(const T* x, const T* g, const Shape& s, T* gw, T* gb, int64_t first) {
  const int64_t length = s.row_length(), count = std::min<int64_t>(V * L, s.out_channels - first);
  constexpr int MOST = (REGISTERS - 2 - V) / V > 15 ? 15 : (REGISTERS - 2 - V) / V;
  with_block<15, 12, 10, 9, 8, 6, 5, 4, 3, 2, 1>(std::min<int64_t>(MOST, pick_block<MOST>(length)), [&](auto block) {
    constexpr int Q = decltype(block)::value;
    if constexpr (Q <= MOST)
      for (int64_t row = 0; row < s.filter_rows; row++)
        for (int64_t q = 0; q < length; q += Q) {
          const int64_t start = std::min(q, length - Q);  // the last block may compute some places again
          T* to = gw + (first * s.filter_rows + row) * length + start;
          filter_gradient_block<T, L, V, Q>(x + s.input_row(0, row) + start, g + first, s, count, to);
        }
  });
  if (gb) sum_channels<T, L, V>(g + first, s, Some<T, L>(count - L * (V - 1)), gb + first);
}

template <class T>
void compute_filter_gradient(const T* x, const T* g, const Shape& s, T* gw, T* gb) {
  for_channel_blocks<T>(s.out_channels, [&](int64_t first, auto l, auto v) {
    filter_gradient_channels<T, decltype(l)::value, decltype(v)::value>(x, g, s, gw, gb, first);
  });
}

// ---- gradient of the input

// Adds to V vectors of the gradients of patch rows, for P neighbouring outputs; `packed` is [output channel][V vectors].
template <class T, int L, int V, int P>
__attribute__((noinline)) void input_gradient_block(const T* g, const T* packed, int64_t packed_step, const Shape& s, T* gx, Some<T, L> end) {
  Lanes<T, L> sums[P][V] = {};
  for (int64_t o = 0; o < s.out_channels; o++) {
    Lanes<T, L> weights[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) weights[v] = load<T, L>(packed + o * packed_step + L * v);
#pragma GCC unroll 16
    for (int p = 0; p < P; p++) {
      const T slope = g[p * s.out_channels + o];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[p][v] += weights[v] * slope;
    }
  }
#pragma GCC unroll 16
  for (int p = 0; p < P; p++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      T* to = gx + p * s.step() + L * v;
      if (v == V - 1)
        end.store(to, end.load(to) + sums[p][v]);
      else
        store<T, L>(to, load<T, L>(to) + sums[p][v]);
    }
}

// The same for all columns of an output row, in blocks of at most P.
template <class T, int L, int V, int P>
void input_gradient_row(const T* g, const T* packed, int64_t packed_step, const Shape& s, T* gx, Some<T, L> end) {
  const int64_t length = pick_block<P>(s.out_columns);
  for (int64_t column = 0; column < s.out_columns; column += length) {
    const T* by = g + column * s.out_channels;
    T* to = gx + column * s.step();
    with_exact_block<P>(std::min(length, s.out_columns - column), [&](auto block) {
      input_gradient_block<T, L, V, decltype(block)::value>(by, packed, packed_step, s, to, end);
    });
  }
}

template <class T>
void compute_input_gradient(const T* g, const T* w, const Shape& s, T* gx) {
  const int64_t length = s.row_length();
  std::fill(gx, gx + s.images * s.rows * s.columns * s.channels, T(0));
  for_channel_blocks<T>(length, [&](int64_t first, auto l, auto v) {
    constexpr int L = decltype(l)::value, V = decltype(v)::value, P = V == 1 ? 10 : (REGISTERS - 2 - V) / V;
    const int64_t count = std::min<int64_t>(V * L, length - first);
    T* packed = scratch<T>(PACKED_FILTERS, s.filter_rows * s.out_channels * V * L);
    if (count < V * L) std::fill(packed, packed + s.filter_rows * s.out_channels * V * L, T(0));
    for (int64_t o = 0; o < s.out_channels; o++)
      for (int64_t row = 0; row < s.filter_rows; row++)
        std::copy_n(w + (o * s.filter_rows + row) * length + first, count, packed + (row * s.out_channels + o) * V * L);
    for (int64_t n = 0; n < s.images; n++)
      for (int64_t row = 0; row < s.out_rows; row++)
        for (int64_t i = 0; i < s.filter_rows; i++)
          input_gradient_row<T, L, V, P>(g + s.output_row(n, row), packed + i * s.out_channels * V * L, V * L, s,
                                         gx + s.input_row(n, row * s.stride_rows + i) + first, Some<T, L>(count - L * (V - 1)));
  });
}

// ---- max-pooling, with a ReLU in front of it where wanted; where the maximum was is kept as its number in the window

struct Window {
  int64_t images, rows, columns, channels, out_rows, out_columns, height, width, stride_rows, stride_columns;

  int64_t input(int64_t n, int64_t row, int64_t column) const { return ((n * rows + row) * columns + column) * channels; }
  int64_t output(int64_t n, int64_t row, int64_t column) const {
    return ((n * out_rows + row) * out_columns + column) * channels;
  }
};

template <class T>
using Number = typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type;
template <class T, int L>
using Numbers = Lanes<Number<T>, L>;
template <int L>
using Bytes = Lanes<uint8_t, L>;

template <class T, int L>
void pool_channels(const T* x, const Window& w, bool relu, T* y, uint8_t* places, Some<T, L> end, int64_t count) {
  for (int64_t n = 0; n < w.images; n++)
    for (int64_t row = 0; row < w.out_rows; row++)
      for (int64_t column = 0; column < w.out_columns; column++) {
        const T* from = x + w.input(n, row * w.stride_rows, column * w.stride_columns);
        Lanes<T, L> most = end.load(from);
        Numbers<T, L> place{};
        for (int64_t i = 0; i < w.height; i++)
          for (int64_t j = 0; j < w.width; j++) {
            const Lanes<T, L> here = end.load(from + (i * w.columns + j) * w.channels);
            const auto larger = (here > most) | (here != here);  // a NaN counts as the maximum, as in torch
            most = larger ? here : most;
            place = larger ? Numbers<T, L>{} + Number<T>(i * w.width + j) : place;
          }
        if (relu) most = most < 0 ? Lanes<T, L>{} : most;
        const int64_t at = w.output(n, row, column);
        end.store(y + at, most);
        const Bytes<L> bytes = __builtin_convertvector(place, Bytes<L>);
        std::memcpy(places + at, &bytes, count);
      }
}

template <class T, int L>
void pool_gradient_channels(const T* g, const T* y, const uint8_t* places, const Window& w, bool relu, T* gx,
                            Some<T, L> end, int64_t count) {
  const bool adds = w.stride_rows < w.height || w.stride_columns < w.width;
  for (int64_t n = 0; n < w.images; n++)
    for (int64_t row = 0; row < w.out_rows; row++)
      for (int64_t column = 0; column < w.out_columns; column++) {
        const int64_t at = w.output(n, row, column);
        T* to = gx + w.input(n, row * w.stride_rows, column * w.stride_columns);
        Lanes<T, L> slope = end.load(g + at);
        if (relu) slope = end.load(y + at) <= 0 ? Lanes<T, L>{} : slope;
        Bytes<L> bytes{};
        std::memcpy(&bytes, places + at, count);
        const Numbers<T, L> place = __builtin_convertvector(bytes, Numbers<T, L>);
        for (int64_t i = 0; i < w.height; i++)
          for (int64_t j = 0; j < w.width; j++) {
            T* here = to + (i * w.columns + j) * w.channels;
            const Lanes<T, L> part = place == Number<T>(i * w.width + j) ? slope : Lanes<T, L>{};
            end.store(here, adds ? end.load(here) + part : part);
          }
      }
}

// Calls `call(first, L, count)` for blocks of up to L channels.
template <class T, class Call>
void for_lanes(int64_t channels, Call call) {
  constexpr int L = VECTOR_BYTES / sizeof(T);
  for (int64_t first = 0; first < channels; first += L) {
    const int64_t count = std::min<int64_t>(L, channels - first);
    if (L >= 8 && count <= L / 2)
      call(first, std::integral_constant<int, L >= 8 ? L / 2 : L>(), count);
    else
      call(first, std::integral_constant<int, L>(), count);
  }
}

template <class T>
void pool(const T* x, const Window& w, bool relu, T* y, uint8_t* places) {
  for_lanes<T>(w.channels, [&](int64_t first, auto l, int64_t count) {
    constexpr int L = decltype(l)::value;
    pool_channels<T, L>(x + first, w, relu, y + first, places + first, Some<T, L>(count), count);
  });
}

template <class T>
void pool_gradient(const T* g, const T* y, const uint8_t* places, const Window& w, bool relu, T* gx) {
  const bool covers = w.out_rows * w.height == w.rows && w.out_columns * w.width == w.columns &&
                      w.stride_rows == w.height && w.stride_columns == w.width;
  if (!covers) std::fill(gx, gx + w.images * w.rows * w.columns * w.channels, T(0));
  for_lanes<T>(w.channels, [&](int64_t first, auto l, int64_t count) {
    constexpr int L = decltype(l)::value;
    pool_gradient_channels<T, L>(g + first, y + first, places + first, w, relu, gx + first, Some<T, L>(count), count);
  });
}

// ---- products of matrices, one of which has few rows

// A matrix whose numbers lie `row` and `column` apart.
template <class T>
struct Matrix {
  T* first;
  int64_t row, column;
};

// c[r][...] = bias[...] + sum over k of a[r][k] * b[k][...], or added to c with a factor; R rows, V vectors of columns.
template <class T, int L, int V, int R>
__attribute__((noinline)) void product_block(Matrix<const T> a, Matrix<const T> b, int64_t inner, const T* bias,
                                             T factor, bool adds, Matrix<T> c, Some<T, L> end) {
  Lanes<T, L> sums[R][V] = {};
  for (int64_t k = 0; k < inner; k++) {
    const T* from = b.first + k * b.row;
    Lanes<T, L> right[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) right[v] = v == V - 1 ? end.load(from + L * v) : load<T, L>(from + L * v);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const T left = a.first[r * a.row + k * a.column];
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] += right[v] * left;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      T* to = c.first + r * c.row + L * v;
      const Some<T, L> here = v == V - 1 ? end : Some<T, L>(L);
      Lanes<T, L> sum = sums[r][v];
      if (bias) sum += here.load(bias + L * v);
      if (adds) sum = here.load(to) + sum * factor;
      here.store(to, sum);
    }
}

template <class T>
void multiply(Matrix<const T> a, Matrix<const T> b, int64_t rows, int64_t inner, int64_t columns, const T* bias,
              T factor, bool adds, Matrix<T> c) {
  for_channel_blocks<T>(columns, [&](int64_t first, auto l, auto v) {
    constexpr int L = decltype(l)::value, V = decltype(v)::value, MOST = V == 1 ? 10 : (REGISTERS - 2 - V) / V;
    const Some<T, L> end(std::min<int64_t>(V * L, columns - first) - L * (V - 1));
    const int64_t length = pick_block<MOST>(rows);
    for (int64_t row = 0; row < rows; row += length)
      with_exact_block<MOST>(std::min(length, rows - row), [&](auto block) {
        product_block<T, L, V, decltype(block)::value>({a.first + row * a.row, a.row, a.column},
                                                       {b.first + first, b.row, 1}, inner, bias ? bias + first : nullptr,
                                                       factor, adds, {c.first + row * c.row + first, c.row, 1}, end);
      });
  });
}

// c[r][n] = bias[n] + a[r] . b[n], for rows of `inner` neighbouring numbers; R rows of a, N rows of b.
template <class T, int L, int R, int N>
__attribute__((noinline)) void dot_block(const T* a, int64_t a_row, const T* b, int64_t b_row, int64_t inner,
                                         const T* bias, T* c, int64_t c_row) {
  Lanes<T, L> sums[R][N] = {};
  const auto add = [&](int64_t k, auto from) {
    Lanes<T, L> right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = from(b + n * b_row + k);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Lanes<T, L> left = from(a + r * a_row + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[r][n] += left * right[n];
    }
  };
  int64_t k = 0;
  for (; k + L <= inner; k += L) add(k, [](const T* from) { return load<T, L>(from); });
  if (k < inner) add(k, [rest = Some<T, L>(inner - k)](const T* from) { return rest.load(from); });
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) c[r * c_row + n] = sum_lanes<T, L>(sums[r][n]) + (bias ? bias[n] : T(0));
}

template <class T>
void multiply_transposed(const T* a, int64_t a_row, const T* b, int64_t b_row, int64_t rows, int64_t inner,
                         int64_t columns, const T* bias, T* c, int64_t c_row) {
  constexpr int L = VECTOR_BYTES / sizeof(T), N = REGISTERS < 32 ? 2 : 4, MOST = 5;
  const int64_t length = pick_block<MOST>(rows), wide = pick_block<N>(columns);
  for (int64_t column = 0; column < columns; column += wide)
    for (int64_t row = 0; row < rows; row += length)
      with_exact_block<MOST>(std::min(length, rows - row), [&](auto block) {
        with_exact_block<N>(std::min(wide, columns - column), [&](auto several) {
          dot_block<T, L, decltype(block)::value, decltype(several)::value>(
              a + row * a_row, a_row, b + column * b_row, b_row, inner, bias ? bias + column : nullptr,
              c + row * c_row + column, c_row);
        });
      });
}

// ---- operations of torch

Tensor last(const Tensor& t) { return t.contiguous(at::MemoryFormat::ChannelsLast); }
Tensor empty_last(at::IntArrayRef sizes, const Tensor& like) {
  return at::empty(sizes, like.options().memory_format(at::MemoryFormat::ChannelsLast));
}

// The images with zeros around them; without padding, the images themselves.
template <class T>
const T* pad_images(const Tensor& x, at::IntArrayRef padding) {
  const T* from = x.const_data_ptr<T>();
  if (padding[0] == 0 && padding[1] == 0) return from;
  const int64_t rows = x.size(2), margin = padding[1] * x.size(1), length = x.size(3) * x.size(1), row = length + 2 * margin;
  T* to = scratch<T>(PADDED_IMAGES, x.size(0) * (rows + 2 * padding[0]) * row);
  T* const first = to;
  for (int64_t n = 0; n < x.size(0); n++) {
    to = std::fill_n(to, padding[0] * row, T(0));
    for (int64_t i = 0; i < rows; i++, from += length) {
      to = std::fill_n(to, margin, T(0));
      to = std::copy_n(from, length, to);
      to = std::fill_n(to, margin, T(0));
    }
    to = std::fill_n(to, padding[0] * row, T(0));
  }
  return first;
}

// The inner part of padded images.
template <class T>
void crop_images(const T* from, at::IntArrayRef padding, const Tensor& x) {
  T* to = x.mutable_data_ptr<T>();
  const int64_t rows = x.size(2), margin = padding[1] * x.size(1), length = x.size(3) * x.size(1), row = length + 2 * margin;
  for (int64_t n = 0; n < x.size(0); n++)
    for (int64_t i = 0; i < rows; i++, to += length)
      std::copy_n(from + ((n * (rows + 2 * padding[0]) + padding[0] + i) * row + margin), length, to);
}

Shape measure(const Tensor& x, const Tensor& w, at::IntArrayRef stride, at::IntArrayRef padding) {
  Shape s;
  s.images = x.size(0), s.channels = x.size(1);
  s.rows = x.size(2) + 2 * padding[0], s.columns = x.size(3) + 2 * padding[1];
  s.out_channels = w.size(0), s.filter_rows = w.size(2), s.filter_columns = w.size(3);
  s.stride_rows = stride[0], s.stride_columns = stride[1];
  s.out_rows = (s.rows - s.filter_rows) / s.stride_rows + 1;
  s.out_columns = (s.columns - s.filter_columns) / s.stride_columns + 1;
  TORCH_CHECK(w.size(1) == s.channels && s.rows >= s.filter_rows && s.columns >= s.filter_columns);
  return s;
}

Tensor conv2d(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, at::IntArrayRef stride,
              at::IntArrayRef padding) {
  const Tensor images = last(x), filters = last(w), bias = b ? b->contiguous() : Tensor();
  const Shape s = measure(images, filters, stride, padding);
  Tensor y = empty_last({s.images, s.out_channels, s.out_rows, s.out_columns}, x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "conv2d", [&] {
    convolve<scalar_t>(pad_images<scalar_t>(images, padding), filters.const_data_ptr<scalar_t>(),
                       b ? bias.const_data_ptr<scalar_t>() : nullptr, s, y.mutable_data_ptr<scalar_t>());
  });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> conv2d_backward(const Tensor& g, const Tensor& x, const Tensor& w,
                                                   at::IntArrayRef stride, at::IntArrayRef padding, bool wants_x,
                                                   bool wants_w, bool wants_b) {
  const Tensor slopes = last(g), images = last(x), filters = last(w);
  const Shape s = measure(images, filters, stride, padding);
  Tensor gx, gw, gb;
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "conv2d_backward", [&] {
    const scalar_t* by = slopes.const_data_ptr<scalar_t>();
    if (wants_w) {
      gw = empty_last(w.sizes(), w);
      if (wants_b) gb = at::empty({s.out_channels}, w.options().memory_format(at::MemoryFormat::Contiguous));
      compute_filter_gradient<scalar_t>(pad_images<scalar_t>(images, padding), by, s, gw.mutable_data_ptr<scalar_t>(),
                                        wants_b ? gb.mutable_data_ptr<scalar_t>() : nullptr);
    }
    if (wants_x) {
      gx = empty_last(x.sizes(), x);
      const bool padded = padding[0] || padding[1];
      scalar_t* to = padded ? scratch<scalar_t>(PADDED_IMAGES, s.images * s.rows * s.columns * s.channels)
                            : gx.mutable_data_ptr<scalar_t>();
      compute_input_gradient<scalar_t>(by, filters.const_data_ptr<scalar_t>(), s, to);
      if (padded) crop_images<scalar_t>(to, padding, gx);
    }
  });
  return {gx, gw, gb};
}

Window measure_window(at::IntArrayRef sizes, at::IntArrayRef window, at::IntArrayRef stride) {
  Window w;
  w.images = sizes[0], w.channels = sizes[1], w.rows = sizes[2], w.columns = sizes[3];
  w.height = window[0], w.width = window[1], w.stride_rows = stride[0], w.stride_columns = stride[1];
  w.out_rows = (w.rows - w.height) / w.stride_rows + 1, w.out_columns = (w.columns - w.width) / w.stride_columns + 1;
  TORCH_CHECK(w.rows >= w.height && w.columns >= w.width && w.height * w.width <= 256);
  return w;
}

std::tuple<Tensor, Tensor> max_pool2d(const Tensor& x, at::IntArrayRef window, at::IntArrayRef stride, bool relu) {
  const Tensor images = last(x);
  const Window w = measure_window(x.sizes(), window, stride);
  Tensor y = empty_last({w.images, w.channels, w.out_rows, w.out_columns}, x);
  Tensor places = at::empty({y.numel()}, x.options().dtype(at::kByte).memory_format(at::MemoryFormat::Contiguous));
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "max_pool2d", [&] {
    pool<scalar_t>(images.const_data_ptr<scalar_t>(), w, relu, y.mutable_data_ptr<scalar_t>(),
                   places.mutable_data_ptr<uint8_t>());
  });
  return {y, places};
}

Tensor max_pool2d_backward(const Tensor& g, const Tensor& y, const Tensor& places, at::IntArrayRef sizes,
                           at::IntArrayRef window, at::IntArrayRef stride, bool relu) {
  const Tensor slopes = last(g), pooled = last(y);
  const Window w = measure_window(sizes, window, stride);
  Tensor gx = empty_last(sizes, g);
  AT_DISPATCH_FLOATING_TYPES(g.scalar_type(), "max_pool2d_backward", [&] {
    pool_gradient<scalar_t>(slopes.const_data_ptr<scalar_t>(), pooled.const_data_ptr<scalar_t>(),
                            places.const_data_ptr<uint8_t>(), w, relu, gx.mutable_data_ptr<scalar_t>());
  });
  return gx;
}

// A matrix, or a stack of them: where the first begins, and how far apart matrices, rows and columns are.
struct Stack {
  int64_t count, rows, columns, step, row, column;
  explicit Stack(const Tensor& t) {
    const int64_t more = t.dim() - 2;
    count = more ? t.size(0) : 1, rows = t.size(more), columns = t.size(more + 1);
    step = more ? t.stride(0) : 0, row = t.stride(more), column = t.stride(more + 1);
  }
};

// bias + a @ b, where the numbers of a row or of a column of b are neighbours; a has few rows.
Tensor matmul(const std::optional<Tensor>& bias, const Tensor& a, const Tensor& b) {
  const bool by_dots = b.stride(-1) != 1;
  const Tensor lefts = by_dots && a.stride(-1) != 1 ? a.contiguous() : a, added = bias ? bias->contiguous() : Tensor();
  const Stack left(lefts), right(b);
  TORCH_CHECK(right.count == left.count && right.rows == left.columns && (!by_dots || right.row == 1));
  const int64_t bias_step = bias && added.dim() > 1 ? right.columns : 0;
  TORCH_CHECK(!bias || added.numel() == (bias_step ? left.count : 1) * right.columns);
  Tensor c = a.dim() == 2 ? at::empty({left.rows, right.columns}, a.options())
                          : at::empty({left.count, left.rows, right.columns}, a.options());
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "matmul", [&] {
    for (int64_t i = 0; i < left.count; i++) {
      const scalar_t* from = lefts.const_data_ptr<scalar_t>() + i * left.step;
      const scalar_t* by = b.const_data_ptr<scalar_t>() + i * right.step;
      const scalar_t* plus = bias ? added.const_data_ptr<scalar_t>() + i * bias_step : nullptr;
      scalar_t* to = c.mutable_data_ptr<scalar_t>() + i * left.rows * right.columns;
      if (by_dots)
        multiply_transposed<scalar_t>(from, left.row, by, right.column, left.rows, left.columns, right.columns, plus, to,
                                      right.columns);
      else
        multiply<scalar_t>({from, left.row, left.column}, {by, right.row, 1}, left.rows, left.columns, right.columns, plus,
                           0, false, {to, right.columns, 1});
    }
  });
  return c;
}

// c += alpha * a @ b, in place; b has few rows.
Tensor& add_matmul_(Tensor& c, const Tensor& a, const Tensor& b, double alpha) {
  const Tensor rights = b.contiguous();
  const Stack sum(c), left(a), right(rights);
  TORCH_CHECK(sum.column == 1 && sum.rows == left.rows && sum.columns == right.columns && right.rows == left.columns);
  TORCH_CHECK(sum.count == left.count && sum.count == right.count);
  AT_DISPATCH_FLOATING_TYPES(c.scalar_type(), "add_matmul_", [&] {
    for (int64_t i = 0; i < sum.count; i++)
      multiply<scalar_t>({a.const_data_ptr<scalar_t>() + i * left.step, left.row, left.column},
                         {rights.const_data_ptr<scalar_t>() + i * right.step, right.row, 1}, sum.rows, left.columns,
                         sum.columns, nullptr, alpha, true, {c.mutable_data_ptr<scalar_t>() + i * sum.step, sum.row, 1});
  });
  return c;
}

}  // namespace

TORCH_LIBRARY(shoal_native, m) {
  m.def("conv2d(Tensor x, Tensor w, Tensor? b, int[] stride, int[] padding) -> Tensor", &conv2d);
  m.def(
      "conv2d_backward(Tensor g, Tensor x, Tensor w, int[] stride, int[] padding, bool wants_x, bool wants_w, bool "
      "wants_b) -> (Tensor, Tensor, Tensor)",
      &conv2d_backward);
  m.def("max_pool2d(Tensor x, int[] window, int[] stride, bool relu) -> (Tensor, Tensor)", &max_pool2d);
  m.def(
      "max_pool2d_backward(Tensor g, Tensor y, Tensor places, int[] sizes, int[] window, int[] stride, bool relu) -> "
      "Tensor",
      &max_pool2d_backward);
  m.def("matmul(Tensor? bias, Tensor a, Tensor b) -> Tensor", &matmul);
  m.def("add_matmul_(Tensor(c!) c, Tensor a, Tensor b, float alpha) -> Tensor(c!)", &add_matmul_);
}
