// Whether a seed is still read whole: proto3 skips what it does not know, so an old encoding parses
// with fields missing. What was read, written again, has to be the same bytes.
#pragma once

#include <string>

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

namespace emberd::fuzz {

// What `bytes` say as a Message, as the present proto writes it: maps by key, nothing unknown.
// Empty if they are no Message.
template <typename Message>
std::string Canonical(const std::string& bytes) {
  Message message;
  if (!message.ParseFromString(bytes)) return "";
  message.DiscardUnknownFields();
  std::string written;
  {
    google::protobuf::io::StringOutputStream stream(&written);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.SetSerializationDeterministic(true);
    message.SerializeToCodedStream(&coded);
  }  // the streams give the last bytes when they end
  return written;
}

}  // namespace emberd::fuzz
