// Rows of activations in the form that products read (split.cuh), for steps of several rows: a warp per record. With a
// norm's weight the values are multiplied by it, and the products divide.
#include "split.cuh"

template <bool FLOATS>
DEVICE void split(const float* x, const float* norm, int columns, const Step& step, int wanted, int first, u8* records) {
    let_next_start();
    wait_for_inputs();
    const int lane = threadIdx.x % WARP, count = (columns + BLOCK - 1) / BLOCK;
    const int row = blockIdx.y, at = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (at >= count || first + row >= step_rows(step, wanted)) return;
    u8* record = records + ((long)row * count + at) * RECORD;
    float v[4], weight[4];
    load_four<!FLOATS>(x + (long)(first + row) * columns, at * BLOCK + lane * 4, columns, v);
    if (norm) {
        load_four<!FLOATS>(norm, at * BLOCK + lane * 4, columns, weight);
        const float squares = take_norm(v, weight);
        if (lane == 0) *(float*)(record + RECORD_SQUARES) = squares;
    }
    if (FLOATS) put_floats(record, v, lane);
    else put_halves(record, v, lane);
}
KERNEL split_floats(const float* x, const float* norm, int columns, Step step, int wanted, int first, u8* records) {
    split<true>(x, norm, columns, step, wanted, first, records);
}
KERNEL split_codes(const float* x, const float* norm, int columns, Step step, int wanted, int first, u8* records) {
    split<false>(x, norm, columns, step, wanted, first, records);
}
