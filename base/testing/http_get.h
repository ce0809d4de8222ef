// A minimal HTTP client for tests.
#pragma once

#include <string>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace emberd {

// A connection to 127.0.0.1:port. Reading from it gives up after so many seconds of silence: two
// minutes, which only a failure takes, however busy the machine is.
class HttpConnection {
 public:
  explicit HttpConnection(int port, int silence = 120)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval timeout{.tv_sec = silence, .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~HttpConnection() { close(fd_); }
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  bool connected() const { return connected_; }

  // False if the other side has hung up.
  bool Send(const std::string& text) {
    size_t sent = 0;
    while (connected_ && sent < text.size()) {
      const ssize_t n = send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (n <= 0) return false;
      sent += n;
    }
    return connected_;
  }
  // Everything until the other side hangs up.
  std::string ReadAll() {
    std::string answer;
    char buffer[4096];
    for (ssize_t n; connected_ && (n = read(fd_, buffer, sizeof(buffer))) > 0;) {
      answer.append(buffer, n);
    }
    return answer;
  }

 private:
  const int fd_;
  bool connected_ = false;
};

// Status line, headers and body of what http://127.0.0.1:port`path` answers; empty if nothing
// answers for two minutes. `headers`: further ones, each ends with "\r\n".
inline std::string HttpCall(int port, const std::string& method, const std::string& path,
                            const std::string& headers = "") {
  HttpConnection connection(port);
  connection.Send(method + " " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" +
                  headers + "\r\n");
  return connection.ReadAll();
}

inline std::string HttpGet(int port, const std::string& path) {
  return HttpCall(port, "GET", path);
}

}  // namespace emberd
