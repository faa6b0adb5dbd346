// Options of a method: text in, typed values out. Defaults come from the method's table.
#pragma once

#include <map>
#include <set>
#include <string>

struct kvq_options {
    std::map<std::string, std::string> values;   // every key of the table
    std::map<std::string, std::string> defaults; // likewise, as the table has them
    std::set<std::string> given;                 // keys that were named, if only to say the default
    std::set<std::string> of_data;               // of these, those that calibrated data name and the user does not

    const std::string & str(const char * key) const { return values.at(key); }
    int num(const char * key) const { return std::stoi(values.at(key)); }
    float real(const char * key) const { return std::stof(values.at(key)); }
    bool flag(const char * key) const { return values.at(key) == "true"; }
    bool is(const char * key, const char * value) const { return values.at(key) == value; }
    // of an option of type int|auto: auto stands for the table's number
    int num_or_auto(const char * key) const { return std::stoi((is(key, "auto") ? defaults : values).at(key)); }
};
