// Work on a stream, recorded once and launched again: a CUDA graph. No CUDA header here: host/ includes this file.
#pragma once

class kvq_cuda_graph {
public:
    kvq_cuda_graph() {}
    ~kvq_cuda_graph() { reset(); }
    kvq_cuda_graph(const kvq_cuda_graph &) = delete;
    kvq_cuda_graph & operator=(const kvq_cuda_graph &) = delete;

    // Between begin and end all work on the stream is recorded, not done. False: the work was not recorded, and an
    // older recording is gone.
    bool begin(void * stream);
    bool end(void * stream);
    bool launch(void * stream);
    bool ready() const { return exec != nullptr; }
    void reset();

private:
    // cudaGraphExec_t; kept when a recording of the same shape follows, which is cheaper than a new one
    void * exec = nullptr;
};
