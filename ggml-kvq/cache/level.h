// Methods that fit themselves to an amount of memory have a ladder of plans (methods/method.h, n_levels).
#pragma once

#include "methods/method.h"

#include <string>
#include <vector>

struct kvq_levels {
    const kvq_method & method;
    const kvq_options & options;
    std::vector<kvq_layer_shape> shapes; // of the layers of a cache
    int n_layer = 0;                     // of the model
    int n_cells = 0, n_stream = 1;
    double more = 0.0; // true bits above the level that is found: kvq_more_bits

    // Highest level whose layers take no more true bits than the method may take. KVQ_ERR_OPTION when even the lowest
    // takes more.
    kvq_status find(int & level, std::string & err) const;

private:
    kvq_status find_allowed(int & level, std::string & err) const;
    kvq_status highest(double most, int cells, int & level, std::string & err) const;
    kvq_status bits(int level, int cells, double & out, std::string & err) const;
};

// Layers with a sliding window hold few cells. They may take as many more bits as add a twentieth of a bit to the
// model's average, at the context that its bits count for. channels: of keys and values of a cell, all layers of this
// cache and of the one that holds the whole context; 0 when there is no such one, or it is not larger.
double kvq_more_bits(const kvq_method & method, const kvq_options & o, double channels, int n_cells,
    double channels_whole, int cells_whole);
