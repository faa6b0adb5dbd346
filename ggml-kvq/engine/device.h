// A device: memory, and who computes on it.
#pragma once

#include "engine.h"
#include "space.h"

class kvq_device : public kvq_space, public kvq_engine {};
