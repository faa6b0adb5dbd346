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

    // Highest level whose layers take no more true bits than the method may take. KVQ_ERR_OPTION when even the lowest
    // takes more.
    kvq_status find(int & level, std::string & err) const;

private:
    kvq_status bits(int level, int cells, double & out, std::string & err) const;
};
