# find_package(conv2d_ext REQUIRED) gives the target conv2d_ext::conv2d_ext, with torch's headers and libraries.
#
# CMAKE_PREFIX_PATH: what `python -c "import conv2d_ext; print(conv2d_ext.cmake_prefix_path)"` prints.
# Torch: that of a find_package(Torch) before this one. Else the torch of Python_EXECUTABLE (by default the python3 on
# PATH), for which no CUDA toolkit is needed.

get_filename_component(_conv2d_ext_root "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

# The torch that the library was built with.
file(STRINGS "${_conv2d_ext_root}/_build_info.py" _conv2d_ext_line REGEX "^TORCH_VERSION = ")
string(REGEX MATCH "[0-9]+\\.[0-9]+" _conv2d_ext_wanted "${_conv2d_ext_line}")

if(TARGET torch)
  set(_conv2d_ext_torch "${Torch_VERSION}")
  set(_conv2d_ext_libraries ${TORCH_LIBRARIES})
  set(_conv2d_ext_includes ${TORCH_INCLUDE_DIRS})
else()
  if(NOT Python_EXECUTABLE)
    find_program(Python_EXECUTABLE NAMES python3 python)
  endif()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import torch; print(torch.__version__, torch.__path__[0], sep=';')"
    OUTPUT_VARIABLE _conv2d_ext_found ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT _conv2d_ext_found)
    set(conv2d_ext_FOUND FALSE)
    set(conv2d_ext_NOT_FOUND_MESSAGE
        "${Python_EXECUTABLE} has no torch: call find_package(Torch) first, or set Python_EXECUTABLE")
    return()
  endif()
  list(GET _conv2d_ext_found 0 _conv2d_ext_torch)
  list(GET _conv2d_ext_found 1 _conv2d_ext_folder)
  set(_conv2d_ext_includes "${_conv2d_ext_folder}/include" "${_conv2d_ext_folder}/include/torch/csrc/api/include")
  # The linker would drop libraries of which no symbol is named, and with them the kernels that they register.
  set(_conv2d_ext_libraries "-Wl,--no-as-needed")
  foreach(_conv2d_ext_name IN ITEMS torch torch_cpu torch_cuda c10 c10_cuda)
    if(EXISTS "${_conv2d_ext_folder}/lib/lib${_conv2d_ext_name}.so")
      list(APPEND _conv2d_ext_libraries "${_conv2d_ext_folder}/lib/lib${_conv2d_ext_name}.so")
    endif()
  endforeach()
  list(APPEND _conv2d_ext_libraries "-Wl,--as-needed")
endif()

string(REGEX MATCH "^[0-9]+\\.[0-9]+" _conv2d_ext_minor "${_conv2d_ext_torch}")
if(NOT _conv2d_ext_minor STREQUAL _conv2d_ext_wanted)
  set(conv2d_ext_FOUND FALSE)
  set(conv2d_ext_NOT_FOUND_MESSAGE
      "conv2d_ext was built with torch ${_conv2d_ext_wanted} and can't be linked with torch ${_conv2d_ext_torch}")
  return()
endif()

# Which standard torch's headers want: newer ones refuse less than C++20.
set(_conv2d_ext_standard cxx_std_17)
foreach(_conv2d_ext_folder IN LISTS _conv2d_ext_includes)
  if(EXISTS "${_conv2d_ext_folder}/ATen/ATen.h")
    file(STRINGS "${_conv2d_ext_folder}/ATen/ATen.h" _conv2d_ext_line REGEX "C\\+\\+20 or later")
    if(_conv2d_ext_line)
      set(_conv2d_ext_standard cxx_std_20)
    endif()
  endif()
endforeach()

if(NOT TARGET conv2d_ext::conv2d_ext)
  add_library(conv2d_ext::conv2d_ext SHARED IMPORTED)
  set_target_properties(
    conv2d_ext::conv2d_ext
    PROPERTIES IMPORTED_LOCATION "${_conv2d_ext_root}/libconv2d_ext.so"
               INTERFACE_INCLUDE_DIRECTORIES "${_conv2d_ext_root}/include;${_conv2d_ext_includes}"
               INTERFACE_LINK_LIBRARIES "${_conv2d_ext_libraries}"
               INTERFACE_COMPILE_FEATURES ${_conv2d_ext_standard})
endif()
