// out[r] = the embedding table's row of token r (QUANT names the table's format): a block per token, threads over
// columns. See docs/kernels.md#embed.
#include QUANT

KERNEL embed(Part part, int part_first, Step step, const int* sampled, float* out, int columns) {
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.x;
    if (r >= step_rows(step, 0)) return;
    int id = step.ids[r];
    // A negative id is a slot: the token that was last sampled there.
    if (id < 0) id = sampled[-1 - id];
    id -= part_first;
    if (id < 0 || id >= part.rows) return;
    for (int k = threadIdx.x; k < columns; k += blockDim.x) out[(long)r * columns + k] = Quant::value(part, id, k);
}

// x[r] += the table's row of token r's position.
KERNEL add_positions(Part part, int part_first, Step step, float* x, int columns) {
    let_next_start();
    wait_for_inputs();
    const int r = blockIdx.x;
    if (r >= step_rows(step, 0)) return;
    const int row = step.positions[r] - part_first;
    if (row < 0 || row >= part.rows) return;
    for (int k = threadIdx.x; k < columns; k += blockDim.x) x[(long)r * columns + k] += Quant::value(part, row, k);
}

// Some rows of the part, one after the other: what an upload is checked by.
KERNEL rows_of(Part part, int first, int stride, float* out, int columns) {
    wait_for_inputs();
    int row = first + blockIdx.x * stride;
    if (row >= part.rows) return;
    for (int k = threadIdx.x; k < columns; k += blockDim.x) out[(long)blockIdx.x * columns + k] = Quant::value(part, row, k);
}
