// What an update did, in rows.
#pragma once

#include <cstdint>

namespace emberd::server {

struct RowCounts {
  int64_t updated = 0;
  int64_t skipped = 0;  // left as they were: their gradient was not finite

  RowCounts& operator+=(const RowCounts& other) {
    updated += other.updated;
    skipped += other.skipped;
    return *this;
  }
  bool operator==(const RowCounts& other) const = default;
};

// To and from the answers of the services.
template <typename Message>
RowCounts RowCountsOf(const Message& message) {
  return {message.rows_updated(), message.rows_skipped()};
}
template <typename Message>
void SetRowCounts(const RowCounts& rows, Message* message) {
  message->set_rows_updated(rows.updated);
  message->set_rows_skipped(rows.skipped);
}

}  // namespace emberd::server
