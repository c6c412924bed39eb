// Answers with the model in use of a Shoal device: reads one sample a line, prints its label, probability and run.
//
//     answer /var/lib/shoal-edge/model.onnx
//
// Before each line it looks whether the device has a new model. See docs/operator/programs.md.
#include <onnxruntime_cxx_api.h>
#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

struct Model {
    Ort::Session session{nullptr};
    std::vector<std::string> labels;
    std::string run;
};

std::string fact(const Ort::ModelMetadata& metadata, const char* name) {
    Ort::AllocatorWithDefaultOptions allocator;
    auto found = metadata.LookupCustomMetadataMapAllocated(name, allocator);
    return found ? found.get() : "";
}

// One open reads one version: a new one replaces the link that leads to the file, and never the file.
std::shared_ptr<Model> read(Ort::Env& env, const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (!file || bytes.empty()) throw std::runtime_error("can't read " + path);
    auto model = std::make_shared<Model>();
    model->session = Ort::Session(env, bytes.data(), bytes.size(), Ort::SessionOptions());
    auto metadata = model->session.GetModelMetadata();
    model->run = fact(metadata, "run");
    std::istringstream names(fact(metadata, "labels"));
    for (std::string name; std::getline(names, name);) model->labels.push_back(name);
    return model;
}

int main(int count, char** arguments) {
    if (count != 2) {
        std::cerr << "usage: answer DIR/model.onnx\n";
        return 2;
    }
    Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
    std::shared_ptr<Model> model;
    struct stat known {};
    for (std::string line; std::getline(std::cin, line);) {
        struct stat found {};
        if (stat(arguments[1], &found) != 0) {
            std::cerr << "no model yet\n";
            return 1;
        }
        if (!model || found.st_ino != known.st_ino || found.st_mtim.tv_sec != known.st_mtim.tv_sec ||
            found.st_mtim.tv_nsec != known.st_mtim.tv_nsec) {
            model = read(env, arguments[1]);
            known = found;
        }
        std::istringstream numbers(line);
        std::vector<float> x((std::istream_iterator<float>(numbers)), std::istream_iterator<float>());
        const int64_t shape[] = {1, static_cast<int64_t>(x.size())};
        auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
        auto input = Ort::Value::CreateTensor<float>(memory, x.data(), x.size(), shape, 2);
        const char* takes[] = {"x"};
        const char* gives[] = {"probabilities"};
        auto answers = model->session.Run(Ort::RunOptions(), takes, &input, 1, gives, 1);
        const float* chances = answers[0].GetTensorData<float>();
        const auto classes = answers[0].GetTensorTypeAndShapeInfo().GetElementCount();
        const auto best = std::max_element(chances, chances + classes) - chances;
        std::cout << (model->labels.empty() ? std::to_string(best) : model->labels[best]) << " " << chances[best] << " "
                  << model->run << std::endl;
    }
}
