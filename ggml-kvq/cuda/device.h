// The store's device over CUDA memory, and attention on it. One object per KV cache; all its work is ordered on one stream.
// No CUDA header here: host/ includes this file.
#pragma once

#include "../cache/device.h"

#include <string>

class kvq_cuda_device : public kvq_device {
public:
    explicit kvq_cuda_device(int ordinal);
    ~kvq_cuda_device() override;

    void set_stream(void * stream); // a cudaStream_t; waits for the work on the stream in use until now
    void synchronize();
    static void forget_stream(void * stream); // before it is destroyed: no device uses it any more
    // First failure since creation, "" when there was none. Later calls do nothing useful.
    const std::string & error() const { return err; }

    // NULL: there are kernels for this layer, else why not (and the cure)
    static const char * refuse(const kvq_layer_plan & plan, int head_size_k, int head_size_v);

    // As kvq_attend, with every pointer, the pages too, in device memory.
    void attend(const kvq_attn * attn, int n);

    // Keys and values of n streams as f16 rows [stream][n_kv][n_head_kv][head size], one layer at a time: a workspace of this
    // device, overwritten by the next call. False: out of memory.
    bool expand(const kvq_attn * attn, int n, void ** k, void ** v);

    const char * name() const override { return kernels.c_str(); }
    bool   is_host() const override { return false; }
    void * alloc(size_t nb) override;
    void   free (void * p, size_t nb) override;
    void   zero (void * p, size_t nb) override;
    void   copy (void * to, const void * from, size_t nb) override;
    void   get  (void * host, const void * from, size_t nb) override;
    void   put  (void * to, const void * host, size_t nb) override;
    void   write_rows(const kvq_lane_layout & l, int64_t n, uint16_t * const * to, const float * rows, size_t row_stride, int n_threads) override;
    void   encode(const kvq_lane_layout & l, const kvq_page_block * pages, int n, int n_threads) override;
    void   decode(const kvq_lane_layout & l, const kvq_page_block & page) override;

private:
    bool use();
    bool check(int status, const char * what);
    int         ordinal, n_sm = 1;
    void      * stream = nullptr;
    float     * partial = nullptr;
    size_t      n_partial = 0;
    void      * expanded = nullptr;
    size_t      nb_expanded = 0;
    std::string err, kernels;
};
