// Train a scaled step with ONNX Runtime's C++ interface: train FOLDER
//
// FOLDER is made by `python -m examples.prepare FOLDER`. The trained state is written to FOLDER/trained.

#include <onnxruntime_cxx_api.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace fs = std::filesystem;
using Values = std::map<std::string, Ort::Value>;
using Pairs = std::map<std::string, std::string>;

// Read a JSON object of strings, as graphscale.state and graphscale.names are. Use a JSON library where you have one.
Pairs parse_pairs(const std::string& text) {
  std::vector<std::string> strings;
  for (size_t i = 0; i < text.size(); i++) {
    if (text[i] != '"') continue;
    std::string part;
    while (++i < text.size() && text[i] != '"') {
      if (text[i] == '\\' && text[++i] == 'u') throw std::runtime_error("a name is not ASCII: " + text);
      part += text[i];
    }
    strings.push_back(part);
  }
  Pairs pairs;
  for (size_t i = 0; i + 1 < strings.size(); i += 2) pairs[strings[i]] = strings[i + 1];
  return pairs;
}

Pairs read_metadata(const Ort::Session& session, const char* key) {
  Ort::AllocatorWithDefaultOptions allocator;
  auto text = session.GetModelMetadata().LookupCustomMetadataMapAllocated(key, allocator);
  if (!text) throw std::runtime_error(std::string("the model has no metadata property ") + key);
  return parse_pairs(text.get());
}

std::vector<char> read_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

// Return a tensor with memory of its own.
template <typename T>
Ort::Value make_tensor(const std::vector<int64_t>& shape, const T* data) {
  Ort::AllocatorWithDefaultOptions allocator;
  auto value = Ort::Value::CreateTensor<T>(allocator, shape.data(), shape.size());
  std::copy_n(data, value.GetTensorTypeAndShapeInfo().GetElementCount(), value.template GetTensorMutableData<T>());
  return value;
}

int main(int argc, char** argv) try {
  if (argc != 2) throw std::runtime_error("usage: train FOLDER");
  const fs::path folder = argv[1];
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR);  // ONNX Runtime warns of each input with an initializer
  Ort::Session session(env, (folder / "step.onnx").c_str(), Ort::SessionOptions{});
  const Pairs pairs = read_metadata(session, "graphscale.state");  // {input: output}, the loss scale among them
  const Pairs names = read_metadata(session, "graphscale.names");

  // The first values of inputs without an initializer. GetInputCount leaves out the others, such as the loss scale: their
  // first value is in the file, and the first step needs no feed for them. Every later step does.
  Ort::AllocatorWithDefaultOptions allocator;
  Values carried;
  for (size_t i = 0; i < session.GetInputCount(); i++) {
    const std::string name = session.GetInputNameAllocated(i, allocator).get();
    if (!pairs.count(name)) continue;  // a part of the batch
    const auto bytes = read_bytes(folder / "start" / (name + ".bin"));
    const auto type = session.GetInputTypeInfo(i);
    const auto shape = type.GetTensorTypeAndShapeInfo().GetShape();
    carried.emplace(name, make_tensor(shape, reinterpret_cast<const float*>(bytes.data())));
  }
  std::vector<std::string> output_names;
  std::vector<const char*> outputs;
  for (size_t i = 0; i < session.GetOutputCount(); i++) {
    output_names.emplace_back(session.GetOutputNameAllocated(i, allocator).get());
  }
  for (const auto& name : output_names) outputs.push_back(name.c_str());

  const auto images = read_bytes(folder / "images.bin"), labels = read_bytes(folder / "labels.bin");
  const int64_t batch = 64, pixels = 64, steps = labels.size() / (batch * sizeof(int64_t));
  const float rate = 0.005f;
  for (int64_t step = 0; step < steps; step++) {
    Values feeds;
    const auto* x = reinterpret_cast<const float*>(images.data()) + step * batch * pixels;
    const auto* y = reinterpret_cast<const int64_t*>(labels.data()) + step * batch;
    feeds.emplace("images", make_tensor({batch, pixels}, x));
    feeds.emplace("labels", make_tensor({batch}, y));
    feeds.emplace("learning_rate", make_tensor({}, &rate));
    feeds.merge(carried);  // each tensor is owned by one of the two

    std::vector<const char*> inputs;
    std::vector<Ort::Value> values;
    for (auto& [name, value] : feeds) {
      inputs.push_back(name.c_str());
      values.push_back(std::move(value));
    }
    auto found = session.Run(Ort::RunOptions{}, inputs.data(), values.data(), values.size(), outputs.data(), outputs.size());
    Values results;
    for (size_t i = 0; i < found.size(); i++) results.emplace(output_names[i], std::move(found[i]));

    carried.clear();
    for (const auto& [input, output] : pairs) carried.emplace(input, std::move(results.at(output)));
    const bool applied = *results.at(names.at("all_finite")).GetTensorData<bool>();
    if ((step + 1) % 10 == 0 || !applied) {
      std::printf("step %d  loss %.6g  loss scale %g%s\n", int(step + 1),
                  *results.at(names.at("loss")).GetTensorData<float>(),
                  *carried.at(names.at("loss_scale")).GetTensorData<float>(), applied ? "" : "  skipped");
    }
  }

  fs::create_directories(folder / "trained");
  for (const auto& [name, value] : carried) {
    const auto info = value.GetTensorTypeAndShapeInfo();
    const size_t size = info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 ? 8 : 4;
    std::ofstream file(folder / "trained" / (name + ".bin"), std::ios::binary);
    file.write(static_cast<const char*>(value.GetTensorRawData()), info.GetElementCount() * size);
  }
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
